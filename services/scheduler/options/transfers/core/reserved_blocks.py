"""Counts, as vLLM does, the blocks that prefills in progress will still need."""

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


class ReservedBlocks:
    """Counts the blocks that running prefills need, which a load must leave free."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._longest = config.max_model_len
        self._groups = config.all_groups
        self._most_counted = [
            group.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
            for group in config.all_groups
        ]
        """For each group, the limit on the blocks that are counted for one request, or None."""
        self._num_step_tokens = 0
        if config.num_speculative_tokens:
            self._num_step_tokens = 1 + config.num_speculative_tokens + config.num_lookahead_tokens
        self.num_of_drafts = sum(
            -(-self._num_step_tokens // group.block_size)
            for group in config.all_groups
            if group.attention_type is not AttentionType.STATE_SPACE
        )
        """Number of blocks for the first drafts of a loading request, without states."""

    def lacking(
        self, request: Request, tables: BlockTables | None, appended: BlockTables | None
    ) -> int:
        """Number of blocks that a request still needs for all its tokens and the drafts of its next
        step. `tables` are its block tables, or None if it holds no blocks. `appended` are blocks
        that were allocated but are not in `tables` yet.
        """
        num_tokens = min(request.num_tokens, self._longest)
        total = 0
        for index, group in enumerate(self._groups):
            num_held = None if tables is None else len(tables[index])
            if num_held is not None and appended is not None:
                num_held += len(appended[index])
            total += self._lacking_in(group, self._most_counted[index], num_held, num_tokens)
        return total

    def _lacking_in(
        self, group: KVCacheGroup, most: int | None, num_held: int | None, num_tokens: int
    ) -> int:
        """Number of blocks that a request still needs in one group. In groups with sliding windows,
        `most` limits the number. A group that caches states needs one block. If the request holds
        no block yet, it also needs blocks for drafts.
        """
        size, num_drafts = group.block_size, group.num_speculative_blocks
        if group.aligns_states:
            num_states = 1 if num_held is not None else 1 + num_drafts
            num_wanted = -(-num_tokens // size) + num_drafts - (num_held or 0)
            return max(0, min(num_wanted, num_states))
        num_wanted = -(-(num_tokens + self._num_step_tokens) // size) + num_drafts
        if most is not None:
            num_wanted = min(num_wanted, most)
        return max(0, num_wanted - (num_held or 0))
