"""Truncation of prompts that exceed the client's limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument

_FIELD = "truncate_prompt_tokens"
_AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps either the last or the first `num_tokens` tokens of a prompt. Special tokens count."""

    num_tokens: int
    keeps_end: bool

    def kept(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


def truncation(num_tokens: int, most: int, *, keeps_end: bool) -> Truncation:
    """Returns the truncation that a client requested. `most` is the number of tokens of the longest
    possible prompt. If `num_tokens` is -1, `most` tokens are kept.

    Raises InvalidArgument if `num_tokens` is any other number less than 1, or more than `most`.
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
    """Returns how many tokens of each of two texts are kept, so that at most `most` tokens are kept
    in total. `lengths` are the texts' numbers of tokens. First the longer text is shortened to the
    length of the other, and then both are shortened ("longest_first" of the tokenizers package).
    """
    shorter, longer = sorted(lengths)
    if shorter + longer > most:
        longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = shorter + most % 2
    return (longer, shorter) if lengths[0] > lengths[1] else (shorter, longer)
