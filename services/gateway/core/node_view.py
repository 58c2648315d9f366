"""What the index of cached prefixes knows of one node, and what becomes of a batch of its keys."""

import enum
from dataclasses import dataclass, field

from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.kv_directory import Digest


class Applied(enum.Enum):
    """What became of a batch."""

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
    """What is known of one life of a node."""

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
        """Of the keys in the view."""
        return Digest(self.count, self.xor)
