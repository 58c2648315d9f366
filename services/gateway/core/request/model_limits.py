"""The limits that replicas set for requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.request.pooling import Pooler


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a request. They are the tightest limits of all ready replicas.

    `capacity` is the largest number of tokens, prompt plus output, that a sequence can have in both
    the model and the pool.
    """

    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    priority_scheduling: bool
    hidden_size: int
    pooler: Pooler | None = None
    """How the model computes a vector of a prompt. It is None if the model generates text."""

    @property
    def capacity(self) -> int:
        return min(self.max_model_len, self.max_request_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Limit on the number of prompt tokens. If the model generates text, one token less than
        the capacity.
        """
        return self.capacity if self.pooler is not None else self.capacity - 1


def tightest_limits(limits: Sequence[ModelLimits]) -> ModelLimits:
    """Returns the limits that a request must meet to fit every replica."""
    if len(limits) == 1:
        return limits[0]
    return ModelLimits(
        max_model_len=min(one.max_model_len for one in limits),
        max_request_tokens=min(one.max_request_tokens for one in limits),
        vocab_size=min(one.vocab_size for one in limits),
        eos_token_ids=limits[0].eos_token_ids,
        priority_scheduling=all(one.priority_scheduling for one in limits),
        hidden_size=limits[0].hidden_size,
        pooler=limits[0].pooler,
    )
