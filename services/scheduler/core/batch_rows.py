"""The rows of the workers' batch."""


class BatchRows:
    """Rows from 0 to `max_num_seqs` - 1: each running request has one. The row that was freed last
    is taken first.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._removed: list[int] = []

    @property
    def has_removed(self) -> bool:
        """Whether rows were freed that no step has told the workers of."""
        return bool(self._removed)

    def take(self) -> int:
        """A row for a request."""
        return self._free.pop()

    def free(self, row: int) -> None:
        """Frees the row of a request that does not run any more."""
        self._free.append(row)
        self._removed.append(row)

    def pop_removed(self) -> list[int]:
        """The rows that were freed since the last call, for the workers to empty."""
        removed, self._removed = self._removed, []
        return removed
