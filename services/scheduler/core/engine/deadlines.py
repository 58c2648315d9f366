"""Computes deadlines of work from the times that similar work took before.

Sizes are grouped in classes, one for each power of two. For each class a decaying maximum of the
recent times is kept, and the deadline is a multiple of it. A fixed timeout that suits the slowest
machine would detect a hang late. A class without a measured time gets the longest deadline, because
its first step may compile or allocate. Only time in which the work had processors counts;
`Silence` measures it.
"""

IDLE_CHECK_SECONDS = 5.0
"""Time without work after which a pool or worker is probed."""
_FACTOR = 10.0
_KEPT_SHARE = 0.98
"""Decay of the maximum: a shorter time sets it to a weighted mean of both, with this weight for the
old maximum.
"""


class Deadlines:
    """Deadlines of work, by size, between `floor_seconds` and `ceiling_seconds`. With a smaller
    floor a busy machine would look like one that hangs.
    """

    def __init__(self, floor_seconds: float, ceiling_seconds: float) -> None:
        self.ceiling_seconds = ceiling_seconds
        self._floor_seconds = min(floor_seconds, ceiling_seconds)
        self._longest: dict[int, float] = {}

    def seconds(self, size: int) -> float:
        """How long work of this size may take."""
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
