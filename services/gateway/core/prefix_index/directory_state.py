"""How far the index of cached prefixes can be relied on."""

import enum


class DirectoryState(enum.Enum):
    """The state of the whole index, or of one node."""

    EXACT = "exact"
    """The view is what the pool wrote, as far as it has been read."""
    DEGRADED = "degraded"
    """Something is missing or differs, and is being loaded again; matches may be wrong."""
    FALLBACK = "fallback"
    """Nothing is known: there are no matches, and requests are routed by load."""
    UNUSED = "unused"
    """Fewer than two pools, between which nothing is chosen by what they cache: no matches."""

    @property
    def has_matches(self) -> bool:
        """Whether prompts are looked up in the index."""
        return self is DirectoryState.EXACT or self is DirectoryState.DEGRADED
