"""Groups of layers that share a block table: what each attention type sees, and what it holds."""

import enum
from dataclasses import dataclass


class AttentionType(enum.Enum):
    """What a layer's queries see of the past."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE_SPACE = "state_space"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One group of layers that share a block table.

    `window` is in tokens: the query's own and those before it that a sliding window shows, or the
    length of a chunk; 0 for full attention and for state-space layers.
    """

    attention_type: AttentionType
    block_size: int
    window: int = 0
    num_layers: int = 1

    def first_seen_block(self, num_tokens: int) -> int:
        """The first block that a query from position `num_tokens` on can see; of states only that
        of the last token is needed.
        """
        match self.attention_type:
            case AttentionType.FULL:
                return 0
            case AttentionType.SLIDING_WINDOW:
                return max(0, num_tokens - self.window + 1) // self.block_size
            case AttentionType.CHUNKED_LOCAL:
                return num_tokens // self.window * self.window // self.block_size
            case AttentionType.STATE_SPACE:
                return max(0, num_tokens - 1) // self.block_size

    def max_held_blocks(self, num_slots: int, num_step_tokens: int) -> int:
        """Most blocks that a request of so many slots holds at once, computed in such steps; one
        more for a window, which may begin within a block.
        """
        num_blocks = -(-num_slots // self.block_size)
        match self.attention_type:
            case AttentionType.FULL:
                return num_blocks
            case AttentionType.SLIDING_WINDOW:
                seen = -(-(self.window - 1 + num_step_tokens) // self.block_size) + 1
                return min(seen, num_blocks)
            case AttentionType.CHUNKED_LOCAL:
                return min(-(-(self.window + num_step_tokens) // self.block_size), num_blocks)
            case AttentionType.STATE_SPACE:
                return min(2, num_blocks)
