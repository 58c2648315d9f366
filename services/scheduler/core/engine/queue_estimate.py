"""How fast the queue moves, from what the replica has done lately."""

from collections import deque

MIN_COMPLETIONS = 8
"""Fewest completions from which the rate at which requests end is estimated."""
MIN_BUSY_SECONDS = 0.5
"""Busy time before anything is estimated from tokens: the first steps take longer."""
WINDOW_COMPLETIONS = 64
"""Newest completions from which the rate is taken."""
MARGIN = 1.4
"""Factor of the mean in estimates: a late eviction costs a client more than an early refusal."""


class QueueEstimate:
    """The rate at which requests leave a replica that is full, and what follows from it by Little's
    law: by how much each request that waits delays those behind it, and the time that one runs.

    Until enough requests have ended, the rate is that of computed tokens divided by the tokens that
    a request is expected to take.

    While fewer than `max_running` run, and none waits, the rate is that of arrivals, not what the
    replica can do. That time counts by the share of `max_running` that run, and as much longer as
    steps take when all do.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._busy_seconds = 0.0
        self._running_seconds = 0.0
        """Sum over requests of the time that they ran."""
        self._num_tokens = 0
        """Computed in the busy seconds."""
        self._tokens_per_request = 0.0
        self._marks: deque[tuple[float, float, int]] = deque([(0.0, 0.0, 0)])
        """Busy seconds, running seconds and completions at each sample that saw some."""
        self._num_completed = 0
        self._last: tuple[float, int, int] | None = None
        self.seconds_per_request = 0.0
        """Time by which each request that waits delays those behind it, 0 while not known."""
        self.service_seconds = 0.0
        """Time from a request's admission to its end, 0 while not known."""

    def sample(
        self,
        now_seconds: float,
        *,
        num_running: int,
        num_waiting: int,
        num_completed: int,
        slowdown: float = 1.0,
        num_tokens: int = 0,
        tokens_per_request: float = 0.0,
    ) -> None:
        """Takes in the present counts. `num_completed`: all requests that ended after running.
        `slowdown`: how many times as long a step takes when `max_running` run. `num_tokens`: all
        tokens that were computed. `tokens_per_request`: the tokens that a running request is
        expected to take in all. The last two are used while `counts_tokens`.
        """
        last, self._last = self._last, (now_seconds, num_completed, num_tokens)
        if last is None or not num_running:
            return
        passed, completed = now_seconds - last[0], num_completed - last[1]
        if not num_waiting and num_running < self._max_running:
            passed *= slowdown
            self._busy_seconds += passed * num_running / self._max_running
        else:
            self._busy_seconds += passed
        self._running_seconds += passed * num_running
        self._num_tokens += num_tokens - last[2]
        self._tokens_per_request = tokens_per_request
        if completed:
            self._num_completed += completed
            self._marks.append((self._busy_seconds, self._running_seconds, self._num_completed))
            while self._num_completed - self._marks[1][2] >= WINDOW_COMPLETIONS:
                self._marks.popleft()
        busy_seconds, running_seconds, num_requests = self._window()
        self.seconds_per_request = MARGIN * busy_seconds / num_requests if num_requests else 0.0
        self.service_seconds = MARGIN * running_seconds / num_requests if num_requests else 0.0

    def stand_still(self) -> None:
        """No request can run now: the time until the next sample does not count."""
        self._last = None

    @property
    def counts_tokens(self) -> bool:
        """Whether too few requests have ended to know their rate."""
        return self._num_completed < MIN_COMPLETIONS

    def _window(self) -> tuple[float, float, float]:
        """Busy and running seconds, and how many requests were done in them; 0 where unknown."""
        if self.counts_tokens:
            if self._busy_seconds < MIN_BUSY_SECONDS or not self._tokens_per_request:
                return 0.0, 0.0, 0.0
            num_requests = self._num_tokens / self._tokens_per_request
            return self._busy_seconds, self._running_seconds, num_requests
        busy, running, completed = self._marks[0]
        return (
            self._busy_seconds - busy,
            self._running_seconds - running,
            self._num_completed - completed,
        )


def expected_tokens(num_prompt_tokens: int, num_output_tokens: int, max_num_tokens: int) -> int:
    """Tokens that a request that runs is expected to take in all, prompt and output.

    Its answer becomes twice as long as it is now: all that is known of it is that it has not ended,
    and by Lindy's law as much is expected again (Eliazar, 2017).
    """
    return min(num_prompt_tokens + 2 * num_output_tokens, max_num_tokens)
