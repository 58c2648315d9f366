"""Groups of layers that share a block table: what each attention type sees, and what it holds."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass


class AttentionType(enum.Enum):
    """The tokens that a layer's queries see."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE_SPACE = "state_space"


class MambaCacheMode(enum.Enum):
    """Which earlier states of state-space layers are kept. Names are vLLM's."""

    NONE = "none"
    """Nothing: one state, which each step overwrites. Its prefixes cannot be cached."""
    ALIGN = "align"
    """States at block boundaries, where the steps of a prompt end, each in a block of its own."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One group of layers that share a block table."""

    attention_type: AttentionType
    block_size: int
    """Tokens of a block."""
    window: int = 0
    """Tokens that a sliding window shows, the query's own included, or the length of a chunk; 0 for
    full attention and for state-space layers.
    """
    num_layers: int = 1
    is_eagle_group: bool = False
    """Whether a draft head reads the hidden states at the end of a hit, so that the last block of a
    hit of this group is dropped. If no group is marked, that is done in all of them
    (`PoolConfig.drop_last_hit_block`).
    """
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.NONE
    """Which states state-space layers keep."""
    num_speculative_blocks: int = 0
    """Blocks that state-space layers have besides, one for the state after each draft."""

    @property
    def aligns_states(self) -> bool:
        """Whether the group keeps states at block boundaries."""
        return (
            self.attention_type is AttentionType.STATE_SPACE
            and self.mamba_cache_mode is MambaCacheMode.ALIGN
        )

    @property
    def overwrites_states(self) -> bool:
        """Whether the group keeps one state of a request, whose block stands for all its tokens."""
        return (
            self.attention_type is AttentionType.STATE_SPACE
            and self.mamba_cache_mode is MambaCacheMode.NONE
        )

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

    def max_held_blocks(
        self, num_slots: int, max_in_flight_tokens: int, num_steps_in_flight: int
    ) -> int:
        """Most blocks that a request of `num_slots` holds at once, while steps with
        `max_in_flight_tokens` were planned and not yet processed; one more for a window, which may
        begin within a block. Each of the steps in flight may store a state.
        """
        num_blocks = -(-num_slots // self.block_size)
        match self.attention_type:
            case AttentionType.FULL:
                return num_blocks
            case AttentionType.SLIDING_WINDOW:
                seen = -(-(self.window - 1 + max_in_flight_tokens) // self.block_size) + 1
                return min(seen, num_blocks)
            case AttentionType.CHUNKED_LOCAL:
                return min(-(-(self.window + max_in_flight_tokens) // self.block_size), num_blocks)
            case AttentionType.STATE_SPACE:
                return min(1 + num_steps_in_flight, num_blocks) + self.num_speculative_blocks

    def max_admission_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Most blocks of a request that its admission counts; None: all that it needs.

        Windows give blocks back when a step has been processed, so besides the window there are
        tokens of all batches in flight. As in vLLM this does not depend on the request.
        """
        match self.attention_type:
            case AttentionType.SLIDING_WINDOW:
                longest = min(self.window - 1 + max_in_flight_tokens, max_model_len)
                return -(-longest // self.block_size) + 1
            case AttentionType.CHUNKED_LOCAL:
                longest = min(self.window + max_in_flight_tokens, max_model_len)
                return -(-longest // self.block_size)
            case _:
                return None


def hit_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """Tokens that are whole blocks in every group: hits are multiples of it, unless they may end
    inside a block.
    """
    return math.lcm(*(group.block_size for group in groups))


def chain_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """Tokens of a block in the chains that tell how deep a prompt is cached: the greatest number
    that divides the blocks of all groups whose prefixes can be cached.
    """
    sizes = [group.block_size for group in groups if not group.overwrites_states]
    return math.gcd(*sizes) or hit_block_size(groups)


def hash_block_size(
    groups: Sequence[KVCacheGroup], prefix_match_unit: int | None, *, enable_prefix_caching: bool
) -> int:
    """Tokens that one hash of a chain stands for: those of a block, or of several groups the
    greatest number that divides the blocks of all of them, if `prefix_match_unit` is not given.
    """
    if len(groups) == 1:
        return groups[0].block_size
    if not enable_prefix_caching or any(
        group.attention_type is AttentionType.STATE_SPACE and not group.aligns_states
        for group in groups
    ):
        return hit_block_size(groups)
    return prefix_match_unit or math.gcd(*(group.block_size for group in groups))


def has_partial_hits(groups: Sequence[KVCacheGroup], hash_size: int) -> bool:
    """Whether prefix hits may end inside a block, at any multiple of the hash block size.

    That is so where blocks of states are larger than that. Sliding windows and chunks find whole
    blocks only, so theirs must be of that size.
    """
    return (
        len(groups) > 1
        and any(group.aligns_states and group.block_size > hash_size for group in groups)
        and all(
            group.block_size == hash_size
            for group in groups
            if group.attention_type in (AttentionType.SLIDING_WINDOW, AttentionType.CHUNKED_LOCAL)
        )
    )


def last_state_position(num_tokens: int, unit: int, *, drops_last: bool) -> int:
    """The last multiple of `unit` at which a sequence of `num_tokens` can be continued from a
    state: a token must be left to compute, or, where the last block of hits is dropped, a unit.
    """
    if drops_last:
        return max(0, num_tokens // unit * unit - unit)
    return (num_tokens - 1) // unit * unit
