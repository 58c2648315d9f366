"""The view of one node (a replica's pool) in the index of cached prefixes, and the outcome of
applying a batch of keys to it.
"""

import enum
from dataclasses import dataclass, field

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import Digest


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
