"""The limits that replicas set for requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.request.pooling import Pooler


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits that a replica or a fleet of replicas sets for a request."""

    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    priority_scheduling: bool
    hidden_size: int
    pooler: Pooler | None = None
    """How the model computes the vector of a prompt. It is None if the model generates text."""

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a sequence, prompt plus output, that fit both the model and
        the KV-cache pool.
        """
        return min(self.max_model_len, self.max_request_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Limit on the number of prompt tokens. If the model generates text, the prompt must leave
        room for one token.
        """
        return self.capacity if self.pooler is not None else self.capacity - 1


def tightest_limits(limits: Sequence[ModelLimits]) -> ModelLimits:
    """Returns the limits that a request must meet to be accepted by every replica."""
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
