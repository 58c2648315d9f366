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
        """Whether the tokens from `start` on end with a repetition that this rule detects."""
        num_output = len(token_ids) - start
        longest = min(self.max_pattern_size, num_output // self.min_count)
        return any(
            token_ids[-1] == token_ids[-1 - size] and self._repeats(token_ids, size)
            for size in range(self.min_pattern_size, longest + 1)
        )

    def _repeats(self, token_ids: Sequence[int], size: int) -> bool:
        """Whether the tokens end with `min_count` repetitions of a pattern of `size` tokens. Then
        each token of the repetitions after the first one equals the token `size` positions before.
        Increasingly long parts at the end are compared until the first difference.
        """
        end, wanted, length = len(token_ids), size * (self.min_count - 1), 1
        while length < wanted:
            length = min(8 * length, wanted)
            if token_ids[end - length :] != token_ids[end - length - size : end - size]:
                return False
        return True


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}.{field} {problem}", field=f"{FIELD}.{field}")
