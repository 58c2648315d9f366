"""Groups of layers: what a pool is told about each of them."""

import enum
from dataclasses import dataclass


class AttentionType(enum.Enum):
    """What a layer's queries see of the past."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE_SPACE = "state_space"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers that share a block table.

    `window` is in tokens: the query's own and those before it that a sliding window shows, or the
    length of a chunk; 0 for full attention and for state-space layers.
    """

    attention_type: AttentionType
    block_size: int
    window: int = 0
    num_layers: int = 1
