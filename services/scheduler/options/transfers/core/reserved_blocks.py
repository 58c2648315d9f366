"""Counts the blocks that prefills in progress will still need, as in vLLM."""

from collections.abc import Mapping

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


class ReservedBlocks:
    """Counts the blocks that a KV load must leave free for prefills in progress."""

    def __init__(
        self, config: SchedulerConfig, block_tables: Mapping[Request, BlockTables]
    ) -> None:
        """`block_tables` maps requests that hold blocks to their tables. It changes later."""
        self.prefills: set[Request] = set()
        """Requests that wait for a KV load, or whose prompt is computed in part."""
        self._block_tables = block_tables
        self._longest = config.max_model_len
        self._groups = config.all_groups
        self._most_counted = [
            group.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
            for group in config.all_groups
        ]
        """For each KV-cache group, a limit on the number of blocks of one request, or None."""
        self._num_step_tokens = 0
        if config.num_speculative_tokens:
            self._num_step_tokens = 1 + config.num_speculative_tokens + config.num_lookahead_tokens
        self._num_of_drafts = sum(
            -(-self._num_step_tokens // group.block_size)
            for group in config.all_groups
            if group.attention_type is not AttentionType.STATE_SPACE
        )
        """Number of blocks for the first drafts of a loaded request, in groups without states."""

    def count(self, appended_blocks: Mapping[Request, BlockTables], *, is_alone: bool) -> int:
        """Number of blocks that a load must leave free, because a load cannot be preempted. Counts
        the blocks that prefills in progress still need, and the blocks for the first drafts of the
        request to be loaded. `appended_blocks` are blocks that the planned step has allocated.

        As in vLLM, a request for which no block could be loaded counts as a prefill, even for its
        own next load. If no request runs and no transfer is in progress (`is_alone`), drafts and
        requests without blocks do not count. Otherwise the request could wait for itself, or two
        requests could wait for each other.
        """
        num_of_drafts = 0 if is_alone else self._num_of_drafts
        return num_of_drafts + sum(
            self._lacking(request, self._block_tables.get(request), appended_blocks.get(request))
            for request in self.prefills
            if request in self._block_tables or not is_alone
        )

    def _lacking(
        self, request: Request, tables: BlockTables | None, appended: BlockTables | None
    ) -> int:
        """Number of blocks that a request still needs for all its tokens and the drafts of its next
        step. `tables` are its block tables, or None if it has no blocks. `appended` are further
        blocks, which `tables` does not contain yet.
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
        """Number of blocks that a request still needs in one KV-cache group. `most` limits the
        number in a group with sliding windows. A group that caches states needs one block, and
        blocks for drafts if the request has none yet.
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
