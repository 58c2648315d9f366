import enum


class DirectoryState(enum.Enum):
    """The state of the whole index, or of one node."""

    EXACT = "exact"
    """The view equals the pool's cache at the last entry that was read."""
    DEGRADED = "degraded"
    """Entries are missing or wrong, and are being loaded again. Matches may be wrong."""
    FALLBACK = "fallback"
    """Nothing is known. There are no matches, and requests are routed by load."""
    UNUSED = "unused"
    """There are fewer than two pools. Routing needs no matches, so the index returns none."""

    @property
    def has_matches(self) -> bool:
        """Whether the index can have matches in this state."""
        return self is DirectoryState.EXACT or self is DirectoryState.DEGRADED
