"""The view of one node (a replica's pool) in the index of cached prefixes, and the outcome of
applying a batch of keys to it.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import Digest

if TYPE_CHECKING:
    from services.gateway.core.prefix_index.prefix_index import PrefixIndex


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


class Applied(enum.Enum):
    """The outcome of applying a batch of keys to a view."""

    DONE = "done"
    KNOWN = "known"
    """The view already contains the batch."""
    GAP = "gap"
    """Batches before this one are missing in the view. The node is degraded."""
    DRIFTED = "drifted"
    """The batch was applied, but afterwards the view's digest differed from the digest in the
    batch. The node is degraded.
    """
    AWAITS_SNAPSHOT = "awaits_snapshot"
    """The node is degraded, and needs a snapshot."""
    OTHER_EPOCH = "other_epoch"
    """The batch belongs to an unknown epoch."""


@dataclass(slots=True)
class NodeView:
    """The state of the index for one epoch of a node: the last applied entry, and the digest of the
    keys. An epoch is the time between two resets of the pool.
    """

    node: str
    epoch: int
    groups: tuple[KVCacheGroup, ...]
    sequence: int
    bit: int
    is_exact: bool
    count: int = 0
    xor: int = 0
    has_full_prefixes: bool = field(init=False)
    """Whether lookups may skip blocks, because the only KV-cache group has full attention."""

    def __post_init__(self) -> None:
        self.has_full_prefixes = len(self.groups) == 1 and (
            self.groups[0].attention_type is AttentionType.FULL
        )

    @property
    def digest(self) -> Digest:
        return Digest(self.count, self.xor)


class Loading:
    """A snapshot of a node that is loaded in parts. When it is complete, it replaces the node's
    view.
    """

    def __init__(self, index: "PrefixIndex", view: NodeView) -> None:
        self._index = index
        self._view = view

    def add(self, keys: Iterable[int]) -> None:
        """Adds a part of the keys."""
        self._index.add_keys(self._view, keys)

    def finish(self) -> None:
        """Replaces the node's view with the loaded one."""
        self._index.remove(self._view.node)
        self._index.show(self._view)

    def give_up(self) -> None:
        """Discards the loaded keys. The existing view stays in use."""
        self._index.retire(self._view)
