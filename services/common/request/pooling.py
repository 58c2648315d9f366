"""Models that answer a prompt with a vector: what it is, and how it is asked for."""

import enum
from dataclasses import dataclass

from services.common.errors import InvalidArgument


class PoolingTask(enum.Enum):
    """The result that a model computes of a whole prompt. Values are vLLM's words."""

    EMBED = "embed"
    """A vector for the meaning of the prompt."""
    CLASSIFY = "classify"
    """A number for each class: a score, where there is one class."""


class PoolingType(enum.Enum):
    """Which of a prompt's hidden states become the vector."""

    CLS = "CLS"
    """That of the first token."""
    LAST = "LAST"
    """That of the last token."""
    MEAN = "MEAN"
    """The mean of all."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How one prompt is pooled, in vLLM's words.

    * `dimensions`: how many of the vector's first numbers are kept; None: all.
    * `use_activation`: normalization of embeddings, sigmoid or softmax of classes; None: as the
      model's directory says.
    * `num_first_text_tokens`: of a prompt that joins two texts, tokens up to the second; 0: one
      text.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    num_first_text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pooler:
    """The end of a model that answers prompts with vectors."""

    task: PoolingTask
    pooling_type: PoolingType
    size: int
    """Numbers of a vector."""
    may_shorten: bool = False
    """Whether the first numbers of a vector are one too (Kusupati et al., 2022)."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The lengths of such vectors; where there are none here, any length."""
    takes_whole_prompts: bool = False
    """Whether tokens see later ones: a prompt is computed in one step, and none of it is cached."""

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether a prompt's cached beginning need not be computed: only the last state is used."""
        return self.pooling_type is PoolingType.LAST and not self.takes_whole_prompts

    def check(self, params: PoolingParams, num_tokens: int) -> None:
        """Raises InvalidArgument, which names the field, for a vector that the model does not
        give of a prompt of `num_tokens`.
        """
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
                f"dimensions: vectors of this model have {self.size} numbers, never fewer",
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
