"""How long a request that arrives now would wait, from how fast requests ended before."""

from collections import deque

MIN_COMPLETIONS = 8
"""Fewer say too little: then nothing is estimated."""
WINDOW_COMPLETIONS = 64
"""Completions that the rate is taken from, the newest ones."""
MARGIN = 1.4
"""What is estimated is so much more than the mean: a late eviction costs a client more than an
early refusal.
"""


class QueueEstimate:
    """The rate at which requests leave a replica that is full, and what follows from it by Little's
    law: the time to wait behind so many, and the time that a request runs.

    Time in which no request waits counts by the share of `max_running` that run: else the rate
    would be that of arrivals, and say nothing of what the replica can do.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._busy_seconds = 0.0
        self._running_seconds = 0.0
        """Sum over requests of the time that they ran."""
        self._marks: deque[tuple[float, float, int]] = deque([(0.0, 0.0, 0)])
        """Busy seconds, running seconds and completions at each sample that saw some."""
        self._num_completed = 0
        self._last: tuple[float, int] | None = None

    def sample(
        self, now_seconds: float, *, num_running: int, num_waiting: int, num_completed: int
    ) -> None:
        """Takes in how things stand; `num_completed` are all requests that ended after running."""
        last, self._last = self._last, (now_seconds, num_completed)
        if last is None or not num_running:
            return
        passed, completed = now_seconds - last[0], num_completed - last[1]
        share = 1.0 if num_waiting else min(1.0, num_running / self._max_running)
        self._busy_seconds += share * passed
        self._running_seconds += passed * num_running
        if completed:
            self._num_completed += completed
            self._marks.append((self._busy_seconds, self._running_seconds, self._num_completed))
            while self._num_completed - self._marks[1][2] >= WINDOW_COMPLETIONS:
                self._marks.popleft()

    def stand_still(self) -> None:
        """No request can run now: the time until the next sample does not count."""
        self._last = None

    def wait_seconds(self, num_waiting: int) -> float:
        """Time until so many requests that wait have been scheduled, 0 where that is not known."""
        seconds, _, completed = self._window()
        if completed < MIN_COMPLETIONS:
            return 0.0
        return MARGIN * num_waiting * seconds / completed

    @property
    def service_seconds(self) -> float:
        """Time from a request's admission to its end, 0 where that is not known."""
        _, running_seconds, completed = self._window()
        return MARGIN * running_seconds / completed if completed >= MIN_COMPLETIONS else 0.0

    def _window(self) -> tuple[float, float, int]:
        busy, running, completed = self._marks[0]
        return (
            self._busy_seconds - busy,
            self._running_seconds - running,
            self._num_completed - completed,
        )
