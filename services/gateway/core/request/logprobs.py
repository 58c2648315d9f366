"""The log-probabilities of tokens at consecutive positions."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LOWEST_LOGPROB = -9999.0
"""OpenAI's log-probability of an impossible token. JSON has no -inf."""


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities as a row-major matrix with one row for each position. Column 0 has the
    position's token. The other columns have the most probable tokens in descending order.

    `token_ids` and `logprobs` have `width` values per row. `ranks` has one value per row, the rank
    of the position's token. All are arrays of 4-byte numbers, because lists would take nine times
    the memory.
    """

    width: int
    token_ids: "array[int]"
    logprobs: "array[float]"
    ranks: "array[int]"

    @classmethod
    def of(
        cls, width: int, token_ids: Iterable[int], logprobs: Iterable[float], ranks: Iterable[int]
    ) -> "LogprobRows":
        return cls(width, array("i", token_ids), array("f", logprobs), array("I", ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def extend(self, other: "LogprobRows") -> None:
        """Appends the rows of `other`, which must have the same width."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks

    def part(self, start: int, stop: int | None = None) -> "LogprobRows":
        """Returns the rows from `start` to `stop`, or to the end if `stop` is None."""
        first, last = start * self.width, None if stop is None else stop * self.width
        return LogprobRows(
            self.width,
            self.token_ids[first:last],
            self.logprobs[first:last],
            self.ranks[start:stop],
        )

    def rows(self) -> Iterator[tuple[list[int], list[float], int]]:
        """Yields each row's token ids and log-probabilities, and the rank of its first token."""
        for row, rank in enumerate(self.ranks):
            cells = slice(row * self.width, (row + 1) * self.width)
            yield (
                self.token_ids[cells].tolist(),
                [max(p, LOWEST_LOGPROB) for p in self.logprobs[cells]],
                rank,
            )


def joined(rows: LogprobRows | None, more: LogprobRows | None) -> LogprobRows | None:
    """Returns `rows` followed by `more`. May extend `rows` in place."""
    if rows is None or more is None:
        return more if rows is None else rows
    rows.extend(more)
    return rows
