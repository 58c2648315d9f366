"""Selects the slowest requests of each minute."""

from heapq import heappush, heapreplace

_MINUTE_SECONDS = 60.0


class SlowestRequests:
    """Selects a request when it ends, if it is among the `num_kept` slowest requests that have
    ended so far in the current minute. Of N requests in random order, about num_kept * (1 + ln(N /
    num_kept)) are selected.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._minute = -1
        self._slowest: list[float] = []
        """A heap, in seconds."""

    def is_among(self, seconds: float, now: float) -> bool:
        """`now` is a time on a steady clock."""
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
