"""How long work may take, by how long such work took before.

For each class of sizes, one for each power of two, about the longest recent time is kept (a maximum
that decays), and work may take a multiple of it: a fixed timeout that suits the slowest machine
would notice a hang late. A class without a measured time gets the longest time allowed: its first
step may compile or allocate. Times are of work that had processors: `Silence` counts them.
"""

IDLE_CHECK_SECONDS = 5.0
"""Time without work after which a pool or worker is probed."""
_FACTOR = 10.0
_KEPT_SHARE = 0.98
"""By a shorter time the longest one decays to this share of itself, plus the rest of that time."""


class Deadlines:
    """Times allowed for work of a size: from `floor_seconds`, below which a busy machine would be
    taken for one that hangs, to `ceiling_seconds`.
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
        """Forgets all times, as when another process does the work."""
        self._longest.clear()
