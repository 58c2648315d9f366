"""Selects the slowest requests of each minute."""

from heapq import heappush, heapreplace

_MINUTE_SECONDS = 60.0


class SlowestRequests:
    """Selects requests when they end. A request is selected if it is among the `num_kept` slowest
    requests that have ended so far in the current minute. So the `num_kept` slowest requests of the
    whole minute are always selected, and some faster requests, too: of N requests in random order,
    about num_kept * (1 + ln(N / num_kept)) are selected.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._minute = -1
        self._slowest: list[float] = []
        """A heap of the longest durations in the current minute, in seconds."""

    def is_among(self, seconds: float, now: float) -> bool:
        """Whether a request that took `seconds` is selected. `now` is a time on a steady clock."""
        minute = int(now // _MINUTE_SECONDS)
        if minute != self._minute:
            self._minute, self._slowest = minute, []
        if len(self._slowest) < self._num_kept:
            heappush(self._slowest, seconds)
            return True
        if not self._slowest or seconds <= self._slowest[0]:
            return False
        heapreplace(self._slowest, seconds)
        return True
