"""Detects outputs that repeat the same few tokens, like vLLM's `repetition_detection`."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument

FIELD = "repetition_detection"
MAX_PATTERN_SIZE = 1024
"""Limit on the pattern size in tokens. It also limits how many sizes are tried for a new token."""
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """The repetition to detect: a pattern of `min_pattern_size` to `max_pattern_size` tokens that
    occurs at least `min_count` times in a row.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    @classmethod
    def of(
        cls, max_pattern_size: int, min_pattern_size: int, min_count: int
    ) -> "RepetitionDetection | None":
        """Creates a rule from a client's values, or None if both sizes are 0."""
        if max_pattern_size == min_pattern_size == 0:
            return None
        return cls(max_pattern_size, min_pattern_size or 1, min_count)

    def validate(self) -> None:
        """Raises InvalidArgument if a size or the count is out of range."""
        if not 0 <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise _invalid(
                "max_pattern_size", f"is {self.max_pattern_size}, not in [0, {MAX_PATTERN_SIZE}]"
            )
        if not 0 < self.min_pattern_size <= self.max_pattern_size:
            raise _invalid(
                "min_pattern_size",
                f"is {self.min_pattern_size}, not in [0, max_pattern_size], which is "
                f"{self.max_pattern_size}",
            )
        if not 2 <= self.min_count <= MAX_COUNT:
            raise _invalid("min_count", f"is {self.min_count}, not in [2, {MAX_COUNT}]")

    def found_at_end(self, token_ids: Sequence[int], start: int) -> bool:
        """Whether the tokens from `start` on end with a repetition that this rule detects.

        In a long run of equal tokens, most pattern sizes fail at the same token, the one before the
        run. Therefore the two tokens that differed for the last size are compared first.
        """
        end = len(token_ids)
        longest = min(self.max_pattern_size, (end - start) // self.min_count)
        earlier, later = end, end - 1
        for size in range(self.min_pattern_size, longest + 1):
            if token_ids[later] != token_ids[later - size]:
                continue
            if earlier + size < end and token_ids[earlier] != token_ids[earlier + size]:
                continue
            differs_at = _difference(token_ids, size, size * (self.min_count - 1))
            if differs_at is None:
                return True
            earlier, later = differs_at - size, differs_at
        return False


def _difference(token_ids: Sequence[int], size: int, num_tokens: int) -> int | None:
    """The last index, among those of the last `num_tokens` tokens, at which the token differs from
    the token `size` positions before. None if all are equal: the tokens repeat a pattern of `size`
    tokens. Increasingly long parts at the end are compared until the first difference.
    """
    begin = end = len(token_ids)
    length = 1
    while begin > end - num_tokens:
        length = min(8 * length, num_tokens)
        part, before = (
            token_ids[end - length : begin],
            token_ids[end - length - size : begin - size],
        )
        if part != before:
            return next(
                index
                for index in range(begin - 1, end - length - 1, -1)
                if token_ids[index] != token_ids[index - size]
            )
        begin = end - length
    return None


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}.{field} {problem}", field=f"{FIELD}.{field}")
