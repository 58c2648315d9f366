"""Which tokens of a prompt are kept that is too long for its client."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument

_FIELD = "truncate_prompt_tokens"
_AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps `num_tokens` tokens of a prompt, special ones included: the last, or the first."""

    num_tokens: int
    keeps_end: bool

    def kept(self, token_ids: list[int]) -> list[int]:
        """The tokens of a prompt that are kept."""
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


def truncation(num_tokens: int, most: int, *, keeps_end: bool) -> Truncation:
    """The truncation that a client asks for; -1 keeps the `most` tokens that a prompt may have.
    Raises InvalidArgument for a number that keeps none, or more than that.
    """
    if num_tokens == _AS_MANY_AS_FIT:
        num_tokens = most
    if not 1 <= num_tokens <= most:
        raise InvalidArgument(
            f"{_FIELD} must be from 1 to {most}, or -1 for as many tokens as fit, not {num_tokens}",
            field=_FIELD,
        )
    return Truncation(num_tokens, keeps_end=keeps_end)


def lengths_kept(lengths: Sequence[int], most: int) -> tuple[int, int]:
    """How much is kept of two texts of these lengths, `most` together: the longer is shortened
    until they are alike, then both ("longest_first" of the tokenizers package).
    """
    shorter, longer = sorted(lengths)
    if shorter + longer > most:
        longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = shorter + most % 2
    return (longer, shorter) if lengths[0] > lengths[1] else (shorter, longer)
