"""One node's part of the index of cached prefixes. A node is the KV-cache pool of one replica."""

import enum
from dataclasses import dataclass, field

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import Digest


class DirectoryState(enum.Enum):
    """The state of the whole index, or of one node."""

    EXACT = "exact"
    """The index equals the pool's cache as of the last entry that was read from the pool's log."""
    DEGRADED = "degraded"
    """Keys are missing or wrong, and are being loaded again. Matches may be wrong."""
    FALLBACK = "fallback"
    """The cached blocks are not known. The index returns no matches, so routing uses only load."""
    UNUSED = "unused"
    """There are fewer than two pools, or with Redis no pool yet. Routing needs no matches, so the
    index returns none.
    """

    @property
    def has_matches(self) -> bool:
        return self is DirectoryState.EXACT or self is DirectoryState.DEGRADED


class Applied(enum.Enum):
    """The outcome of applying a batch of added and removed keys to the view of a node."""

    DONE = "done"
    KNOWN = "known"
    """The view already contains the batch, which was not applied again."""
    GAP = "gap"
    """The view lacks batches before this batch. The node becomes degraded: not exact until its keys
    are loaded again.
    """
    DRIFTED = "drifted"
    """The batch was applied, but then the digest of the view's keys differed from the digest in the
    batch. The node becomes degraded.
    """
    AWAITS_SNAPSHOT = "awaits_snapshot"
    """The batch was not applied, because the node was degraded before, and must first be loaded
    from a snapshot.
    """
    OTHER_EPOCH = "other_epoch"
    """The batch belongs to an epoch that the index does not know."""


@dataclass(slots=True)
class NodeView:
    """The state of the index for one node: the number `sequence` of the last applied entry of the
    pool's log, and the digest of the keys. A new view is made for each epoch, the time between two
    resets of the pool.
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
    """Whether the cached blocks of a prompt always form a prefix, because the only KV-cache group
    has full attention. Lookups may then skip blocks.
    """

    def __post_init__(self) -> None:
        self.has_full_prefixes = len(self.groups) == 1 and (
            self.groups[0].attention_type is AttentionType.FULL
        )

    @property
    def digest(self) -> Digest:
        return Digest(self.count, self.xor)
