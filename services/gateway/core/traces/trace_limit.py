"""Limits the number of traces per minute."""


class TraceLimit:
    """A token bucket with a capacity of `limit`, which is refilled in a minute. Times are in
    seconds on a steady clock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = float(limit)
        self._counted_at = 0.0

    def take(self, now: float) -> bool:
        """Whether one more trace may be made. Counts it."""
        earned = (now - self._counted_at) * self._limit / 60
        self._left, self._counted_at = min(self._left + earned, float(self._limit)), now
        if self._left < 1:
            return False
        self._left -= 1
        return True
