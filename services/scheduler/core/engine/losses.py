"""Counts losses of pool and workers, and computes the delay before the next recovery."""

from services.common.errors import Unavailable
from services.scheduler.core.ports import WorkersLost

FIRST_BACKOFF_SECONDS = 0.1
"""Seconds before the second of several recoveries in a row. Doubles with each further one."""
LAST_BACKOFF_SECONDS = 5.0


class Losses:
    """Counts losses. Losses are in a row if no step succeeded between them."""

    def __init__(self) -> None:
        self.num_of_pool = 0
        self.num_of_workers = 0
        self._num_in_a_row = 0

    @property
    def is_in_a_row(self) -> bool:
        """Whether no progress was made since the last recovery."""
        return self._num_in_a_row > 0

    @property
    def backoff_seconds(self) -> float:
        """Delay before the next recovery, in seconds."""
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
        """Records a successful recovery. The next loss counts as one more in a row."""
        self._num_in_a_row += 1

    def made_progress(self) -> None:
        """Records progress, such as a successful step. The next loss is the first in a row."""
        self._num_in_a_row = 0
