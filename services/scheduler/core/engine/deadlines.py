"""Computes how long work may take from the times that similar work took before.

Work has a size, for example a number of tokens. Sizes are grouped in classes, one for each power of
two. The deadline is a multiple of a decaying maximum of the recent times in the class. A fixed
timeout would have to suit the slowest machine, and would detect hangs late on all others. A class
without a measured time has the longest deadline, because its first step may compile or allocate.
Callers do not count time in which the work had no processor, which `Silence` measures.
"""

IDLE_CHECK_SECONDS = 5.0
"""Seconds without work after which a pool or worker is probed."""
_FACTOR = 10.0
_KEPT_SHARE = 0.98
"""Weight of the old maximum. If a new time is below the maximum, the weighted mean of the old
maximum and the new time becomes the maximum.
"""


class Deadlines:
    """Computes deadlines. No deadline is shorter than the floor, so that a short delay on a busy
    machine is not taken for a hang.
    """

    def __init__(self, floor_seconds: float, ceiling_seconds: float) -> None:
        self.ceiling_seconds = ceiling_seconds
        self._floor_seconds = min(floor_seconds, ceiling_seconds)
        self._longest: dict[int, float] = {}

    def seconds(self, size: int) -> float:
        """The deadline of work of this size, in seconds."""
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
        """Removes all measured times, for example because another process does the work now."""
        self._longest.clear()
