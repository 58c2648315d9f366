"""Computes timeouts for work, such as the steps of a worker, from the durations of earlier work.

A fixed timeout would have to suit the slowest machine, and would detect hangs late on all other
machines. Work has a size, for example a number of tokens. Sizes are grouped in classes, one for
each power of two. The timeout is a multiple of a decaying maximum of the recent durations in the
class. A class without a measured duration has the longest timeout, because the first work of a size
may compile or allocate. Callers do not count time in which the work had no CPU (see `Silence`).
"""

IDLE_CHECK_SECONDS = 5.0
"""Seconds without work after which a scheduler checks whether the pool or a worker still runs."""
_FACTOR = 10.0
_KEPT_SHARE = 0.98
"""Weight of the previous maximum when a shorter duration is measured, so that it decays."""


class Deadlines:
    """Computes timeouts between `floor_seconds` and `ceiling_seconds`. The floor prevents that a
    short delay on a busy machine is mistaken for a hang.
    """

    def __init__(self, floor_seconds: float, ceiling_seconds: float) -> None:
        self.ceiling_seconds = ceiling_seconds
        self._floor_seconds = min(floor_seconds, ceiling_seconds)
        self._longest: dict[int, float] = {}

    def seconds(self, size: int) -> float:
        """The timeout of work of this size, in seconds."""
        longest = self._longest.get(size.bit_length())
        if longest is None:
            return self.ceiling_seconds
        return min(max(_FACTOR * longest, self._floor_seconds), self.ceiling_seconds)

    def took(self, size: int, seconds: float) -> None:
        """Records the time that work of this size took."""
        kind = size.bit_length()
        longest = self._longest.get(kind, 0.0)
        self._longest[kind] = max(seconds, _KEPT_SHARE * longest + (1 - _KEPT_SHARE) * seconds)

    def forget(self) -> None:
        """Removes all measured durations, for example because a new process does the work now."""
        self._longest.clear()
