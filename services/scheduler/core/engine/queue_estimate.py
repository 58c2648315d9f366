"""Estimates from the replica's recent work how long requests wait in the queue."""

from collections import deque

MIN_COMPLETIONS = 8
"""Number of ended requests from which on the completion rate is estimated from completions."""
MIN_BUSY_SECONDS = 0.5
"""Busy seconds before a rate is estimated from tokens, because the first steps take longer."""
WINDOW_COMPLETIONS = 64
"""Number of most recent completions from which the rate is estimated."""
MARGIN = 1.4
"""Factor on the estimates, because a client prefers an early refusal to a timeout in the queue."""


class QueueEstimate:
    """Estimates the rate at which requests complete on a replica with `max_running` requests. Two
    numbers follow from this rate by Little's law: the time that each waiting request adds to the
    wait of requests behind it, and the running time of a request.

    Until enough requests have ended, the completion rate is estimated as the number of tokens
    computed per second, divided by the expected number of tokens of a request.

    Rates are measured over *busy seconds*. While a request waits or `max_running` requests run, a
    second counts as a busy second. Otherwise requests complete only as fast as they arrive. The
    time is then converted to the time in which a full replica would do the same work. To do so, it
    is multiplied by the number of running requests divided by `max_running`, and by the slowdown of
    a step in which `max_running` requests run.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._busy_seconds = 0.0
        self._running_seconds = 0.0
        """Sum of the running times of all requests, in seconds."""
        self._num_tokens = 0
        """Number of tokens that were computed in the busy seconds."""
        self._tokens_per_request = 0.0
        self._marks: deque[tuple[float, float, int]] = deque([(0.0, 0.0, 0)])
        """Busy seconds, running seconds and completed requests since the start, at each sample."""
        self._num_completed = 0
        self._last: tuple[float, int, int] | None = None
        self.seconds_per_request = 0.0
        """Seconds by which each waiting request delays requests behind it. 0 while unknown."""
        self.service_seconds = 0.0
        """Seconds from a request's admission to its end. 0 while unknown."""

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
        """Updates the estimates. `num_completed` and `num_tokens` are the numbers of completed
        requests and of computed tokens since the start. `slowdown` is the time of a step with
        `max_running` requests, divided by the time of a present step. `tokens_per_request` is the
        number of tokens that a running request is expected to have at its end. `num_tokens` and
        `tokens_per_request` are only used while `counts_tokens` is true.
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
        """Excludes the time until the next sample, because no request runs in it."""
        self._last = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the rate is estimated from tokens, because few requests have ended."""
        return self._num_completed < MIN_COMPLETIONS

    def _window(self) -> tuple[float, float, float]:
        """The recent busy seconds, running seconds and completed requests. Zeros if unknown."""
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
    """Number of prompt and output tokens that a running request is expected to have at its end. By
    Lindy's law (Eliazar, 2017), an answer is expected to grow to twice its present length.
    """
    return min(num_prompt_tokens + 2 * num_output_tokens, max_num_tokens)
