"""Computes when the block tables of a decoding request change, for models with KV-cache groups that
free blocks while the request runs.
"""

from collections.abc import Iterable

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.core.config import SchedulerConfig


class WindowClock:
    """Computes the token counts (numbers of computed tokens before a step) at which a request's
    KV-cache group allocates or frees a block.

    A group allocates a block when the tokens, lookahead tokens included, fill its present blocks. A
    group frees a block when its sliding window or state has advanced by one block of stored tokens.
    Tokens of steps in flight count as computed, but are not stored yet. Because the number of steps
    in flight varies, the token counts for every possible number of steps are included.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        lags = range(config.num_steps_in_flight)
        self._phases = sorted(
            {
                (group.block_size, phase % group.block_size)
                for group in config.groups
                for phase in _phases(group, config.num_lookahead_tokens, lags)
            }
        )

    def next_change(self, num_computed_tokens: int) -> int:
        """The smallest token count from `num_computed_tokens` on at which a block table changes."""
        return min(
            num_computed_tokens + (phase - num_computed_tokens) % size
            for size, phase in self._phases
        )


def _phases(group: KVCacheGroup, num_lookahead_tokens: int, lags: Iterable[int]) -> list[int]:
    """The token counts, modulo the block size, at which a group allocates or frees a block. `lags`
    are the possible numbers of tokens in flight.
    """
    match group.attention_type:
        case AttentionType.FULL:
            return [-num_lookahead_tokens]
        case AttentionType.SLIDING_WINDOW:
            return [-num_lookahead_tokens, *(group.window - 1 + lag for lag in lags)]
        case AttentionType.CHUNKED_LOCAL:
            return [-num_lookahead_tokens, *lags]
        case AttentionType.STATE_SPACE:
            return [0, *(1 + lag for lag in lags)]
