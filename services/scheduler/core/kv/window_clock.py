"""When the blocks of a decoding request change, where groups of layers give blocks back."""

from collections.abc import Iterable

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.core.config import SchedulerConfig


class WindowClock:
    """Counts computed tokens before a step at which some group takes a block or gives one back.

    A group takes a block where the tokens, and those that are looked ahead, fill whole blocks. It
    gives one back when a window or a state has moved on by a block, by the tokens that are stored.
    Of those that are computed the last is in flight with asynchronous scheduling, unless nothing
    is: both are counted, so that no change is missed.
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
        """The first number of computed tokens, from this one on, at which something changes."""
        return min(
            num_computed_tokens + (phase - num_computed_tokens) % size
            for size, phase in self._phases
        )


def _phases(group: KVCacheGroup, num_lookahead_tokens: int, lags: Iterable[int]) -> list[int]:
    """The counts, modulo the block size, at which a group changes."""
    match group.attention_type:
        case AttentionType.FULL:
            return [-num_lookahead_tokens]
        case AttentionType.SLIDING_WINDOW:
            return [-num_lookahead_tokens, *(group.window - 1 + lag for lag in lags)]
        case AttentionType.CHUNKED_LOCAL:
            return [-num_lookahead_tokens, *lags]
        case AttentionType.STATE_SPACE:
            return [0, *(1 + lag for lag in lags)]
