"""KV-cache groups (layers that share a block table), and the blocks that their attention needs."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass


class AttentionType(enum.Enum):
    """Which tokens a layer's queries can see."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE_SPACE = "state_space"


class MambaCacheMode(enum.Enum):
    """Which states of state-space (Mamba) layers are kept. The names are vLLM's."""

    NONE = "none"
    """Only one state is kept, and each step overwrites it. Prefixes cannot be cached."""
    ALIGN = "align"
    """States at block boundaries are kept. Steps that compute a prompt end at these boundaries."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One group of layers that share a block table."""

    attention_type: AttentionType
    block_size: int
    """Number of tokens in a block."""
    window: int = 0
    """For sliding windows, the number of tokens that a query sees, its own token included. For
    chunked local attention, the number of tokens in a chunk. For other types, 0.
    """
    num_layers: int = 1
    is_eagle_group: bool = False
    """Whether a draft head (EAGLE) needs the hidden states at the end of a prefix hit in this
    group. The last block of the hit is then dropped and computed again, since hidden states are not
    cached. If no group has this flag, `PoolConfig.drop_last_hit_block` applies to all groups.
    """
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.NONE
    num_speculative_blocks: int = 0
    """Additional blocks per request in a state-space group, one for each draft token's state."""

    @property
    def aligns_states(self) -> bool:
        """Whether the group keeps states at block boundaries."""
        return (
            self.attention_type is AttentionType.STATE_SPACE
            and self.mamba_cache_mode is MambaCacheMode.ALIGN
        )

    @property
    def overwrites_states(self) -> bool:
        """Whether the group keeps only one state per request, which each step overwrites."""
        return (
            self.attention_type is AttentionType.STATE_SPACE
            and self.mamba_cache_mode is MambaCacheMode.NONE
        )

    def first_seen_block(self, num_tokens: int) -> int:
        """The index of the first block that a query at position `num_tokens` or later can see.
        State-space layers need only the block of the last token.
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
        """An upper bound of the number of this group's blocks that a request with `num_slots` token
        slots can have at one time. `max_in_flight_tokens` limits the number of tokens in steps that
        are planned but not processed. A sliding window that begins inside a block needs one block
        more. In a state-space group, each step in flight may store one state.
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
        """Limit on the free blocks that an admission requires for a whole sequence in a group with
        windows or chunks. None for other groups. Blocks outside a window are freed only after a
        step has been processed, so the limit includes the tokens of all steps in flight. As in
        vLLM, the limit does not depend on the request.
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
    """The smallest number of tokens that is a multiple of every group's block size. Hit lengths are
    multiples of this number, except if hits may end inside a block.
    """
    return math.lcm(*(group.block_size for group in groups))


def chain_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """Number of tokens in a block of the hash chains that measure how much of a prompt is cached.
    It is the greatest common divisor of the block sizes of all groups with prefix caching.
    """
    sizes = [group.block_size for group in groups if not group.overwrites_states]
    return math.gcd(*sizes) or hit_block_size(groups)


def hash_block_size(
    groups: Sequence[KVCacheGroup], prefix_match_unit: int | None, *, enable_prefix_caching: bool
) -> int:
    """The number of tokens that each hash in a chain of block hashes covers. With one group, it is
    the group's block size. With several groups, it is `prefix_match_unit`, or by default the
    greatest common divisor of all block sizes. With several groups and without prefix caching, or
    if a group overwrites its states, it is `hit_block_size`.
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
    """Whether prefix hits may end inside a block, at any multiple of `hash_size` tokens. This
    requires a state-space group whose blocks are larger than `hash_size`. Sliding windows and
    chunks match whole blocks only, so their blocks must have `hash_size` tokens.
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
    """The last position, a multiple of `unit`, whose state an equal sequence can continue from. At
    least one token must be left to compute after that position, or a whole unit if `drops_last` is
    set, because then a hit's last block is dropped.
    """
    if drops_last:
        return max(0, num_tokens // unit * unit - unit)
    return (num_tokens - 1) // unit * unit
