"""The view of one node in the index of cached prefixes, and the outcome of applying a batch."""

import enum
from dataclasses import dataclass, field

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import Digest


class Applied(enum.Enum):
    """The outcome of applying a batch of keys to a view."""

    DONE = "done"
    KNOWN = "known"
    """The view contains it already."""
    GAP = "gap"
    """Batches between the view and this one are missing: the node is degraded."""
    DRIFTED = "drifted"
    """It was applied, and the digest differs: the node is degraded."""
    AWAITS_SNAPSHOT = "awaits_snapshot"
    """The node is degraded: only a snapshot helps."""
    OTHER_LIFE = "other_life"
    """It belongs to a life that is not known here."""


@dataclass(slots=True)
class NodeView:
    """The view of one life of a node: its epoch, its last entry and its digest."""

    node: str
    epoch: int
    groups: tuple[KVCacheGroup, ...]
    sequence: int
    bit: int
    is_exact: bool
    count: int = 0
    xor: int = 0
    has_full_prefixes: bool = field(init=False)
    """Whether a look-up may jump: the only group is one of full attention."""

    def __post_init__(self) -> None:
        self.has_full_prefixes = len(self.groups) == 1 and (
            self.groups[0].attention_type is AttentionType.FULL
        )

    @property
    def digest(self) -> Digest:
        """The digest of the keys in the view."""
        return Digest(self.count, self.xor)
