"""The rows of the workers' batch."""

from services.scheduler.core.request import Request


class BatchRows:
    """Allocates the rows of the batch, and lists rows that the workers must clear. The row that was
    freed last is allocated first.
    """

    def __init__(self, num_rows: int) -> None:
        self.removed: list[int] = []
        """Freed rows that no message to the workers has listed yet."""
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self, request: Request) -> None:
        """Allocates a row for a request."""
        request.row = self._free.pop()

    def free(self, request: Request) -> None:
        """Frees the row of a request, if it has one."""
        if request.row is not None:
            self._free.append(request.row)
            self.removed.append(request.row)
            request.row = None

    def take_removed(self) -> list[int]:
        """Returns the rows that the workers must clear with the step that is planned."""
        removed, self.removed = self.removed, []
        return removed
