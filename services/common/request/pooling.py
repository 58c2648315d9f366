"""Parameters of models that compute a vector for a prompt instead of output tokens."""

import enum
from dataclasses import dataclass

from services.common.errors import InvalidArgument


class PoolingTask(enum.Enum):
    """The result that a model computes for a whole prompt. The values are vLLM's names."""

    EMBED = "embed"
    """An embedding vector of the prompt."""
    CLASSIFY = "classify"
    """A number for each class. A model with one class computes a score."""


class PoolingType(enum.Enum):
    """The hidden states of a prompt from which the vector is computed."""

    CLS = "CLS"
    """The hidden state of the first token."""
    LAST = "LAST"
    """The hidden state of the last token."""
    MEAN = "MEAN"
    """The mean of all hidden states."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the vector of one prompt is computed. The names are vLLM's.

    * `dimensions`: the length to which the vector is truncated. None keeps all numbers.
    * `use_activation`: whether embeddings are normalized, or a sigmoid or softmax is applied to
      classes. None selects the default in the model's directory.
    * `num_first_text_tokens`: the number of tokens before the second text, if a prompt joins two
      texts. 0 means one text.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    num_first_text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pooler:
    """The final layer of a model that computes vectors."""

    task: PoolingTask
    pooling_type: PoolingType
    size: int
    """The number of elements in a vector."""
    may_shorten: bool = False
    """Whether vectors may be truncated (Matryoshka embeddings; Kusupati et al., 2022)."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The permitted lengths of truncated vectors. Empty permits any length."""
    takes_whole_prompts: bool = False
    """Whether tokens attend to later tokens, so that a prompt must be computed in one step."""

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether prefix hits can be used, because only the last hidden state is needed."""
        return self.pooling_type is PoolingType.LAST and not self.takes_whole_prompts

    def check(self, params: PoolingParams, num_tokens: int) -> None:
        """Raises InvalidArgument if the parameters are invalid for this model and prompt length."""
        wanted = params.dimensions
        if params.num_first_text_tokens > num_tokens:
            raise InvalidArgument(
                f"num_first_text_tokens is {params.num_first_text_tokens}, but the prompt has "
                f"{num_tokens} tokens",
                field="num_first_text_tokens",
            )
        if wanted is None:
            return
        if not self.may_shorten:
            raise InvalidArgument(
                f"dimensions: vectors of this model always have {self.size} numbers",
                field="dimensions",
            )
        if not 1 <= wanted <= self.size:
            raise InvalidArgument(
                f"dimensions must be from 1 to {self.size}, not {wanted}", field="dimensions"
            )
        known = self.matryoshka_dimensions
        if known and wanted not in known:
            raise InvalidArgument(
                f"dimensions must be one of {', '.join(map(str, known))} for this model, not "
                f"{wanted}",
                field="dimensions",
            )
