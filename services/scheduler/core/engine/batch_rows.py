"""The rows of the workers' batch."""

from services.scheduler.core.request import Request


class BatchRows:
    """Which rows are free, and which ones the workers are to empty. The row that was freed last is
    taken first.
    """

    def __init__(self, num_rows: int) -> None:
        self.removed: list[int] = []
        """Rows that were freed since the last step that the workers were told of."""
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self, request: Request) -> None:
        """Gives a request a row."""
        request.row = self._free.pop()

    def free(self, request: Request) -> None:
        """Frees the row of a request, if it has one."""
        if request.row is not None:
            self._free.append(request.row)
            self.removed.append(request.row)
            request.row = None

    def take_removed(self) -> list[int]:
        """The rows that the workers are to empty with the step that is planned."""
        removed, self.removed = self.removed, []
        return removed
