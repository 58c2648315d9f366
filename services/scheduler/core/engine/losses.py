"""Losses of pool and workers: how many there were, and the wait before the next recovery."""

from services.common.errors import Unavailable
from services.scheduler.core.ports import WorkersLost

FIRST_BACKOFF_SECONDS = 0.1
"""Wait before the second of several recoveries in a row; it doubles with each further one."""
LAST_BACKOFF_SECONDS = 5.0


class Losses:
    """Counts losses; those without progress between them are in a row."""

    def __init__(self) -> None:
        self.num_of_pool = 0
        self.num_of_workers = 0
        self._num_in_a_row = 0

    @property
    def is_in_a_row(self) -> bool:
        """Whether the next loss would follow an earlier one without progress between them."""
        return self._num_in_a_row > 0

    @property
    def backoff_seconds(self) -> float:
        """Time to wait before the next recovery."""
        if self._num_in_a_row == 0:
            return 0.0
        doublings = min(self._num_in_a_row - 1, 16)
        return min(FIRST_BACKOFF_SECONDS * (1 << doublings), LAST_BACKOFF_SECONDS)

    def note(self, lost: Unavailable) -> None:
        """Counts a loss."""
        if isinstance(lost, WorkersLost):
            self.num_of_workers += 1
        else:
            self.num_of_pool += 1

    def recovered(self) -> None:
        """A recovery succeeded: a loss from here on is one more in a row."""
        self._num_in_a_row += 1

    def made_progress(self) -> None:
        """The next loss is the first of a row."""
        self._num_in_a_row = 0
