"""State-space layers, which have a recurrent state instead of keys and values."""

from collections.abc import Iterable, Sequence

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK, BlockId
from services.common.pool.kv_cache_groups import KVCacheGroup, last_state_position
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.group_manager import (
    BlockTable,
    Chain,
    Filling,
    GroupHit,
    GroupManager,
    Need,
)
from services.kvpool.core.pool_config import PoolConfig


class OverwrittenStateManager(GroupManager):
    """Manages tables whose first block stores the request's state, which each step overwrites. The
    other blocks store the states after draft tokens. The block size is the length of the longest
    sequence, so one block covers all tokens. Prefix caching is not supported.
    """

    def num_missing(self, table: BlockTable, need: Need) -> int:
        return super().num_missing(table, self._with_drafts(need))

    def num_missing_behind(self, hit: GroupHit, need: Need) -> int:
        return super().num_missing_behind(hit, self._with_drafts(need))

    def _num_counted(self, num_slots: int) -> int:
        return super()._num_counted(num_slots + self._num_draft_slots)

    def extend(self, table: BlockTable, need: Need) -> list[BlockId]:
        return super().extend(table, self._with_drafts(need))

    @property
    def _num_draft_slots(self) -> int:
        return self._block_size * self._spec.num_speculative_blocks

    def _with_drafts(self, need: Need) -> Need:
        return Need(need.num_slots + self._num_draft_slots, need.num_tokens)


class AlignedStateManager(GroupManager):
    """Manages blocks that each store the state after the last token computed in the block.

    The state depends on all tokens of the sequence up to that token. A request needs one block, a
    second one while a step crosses into another block, and one for each draft token.

    A step reads the state of the previous step and writes the block of the step's last token. The
    blocks between these two have no state, and their entries are null. A block is published under
    the hash at its end only if its state is the state after its last token. Therefore only a step
    that ends at the end of a block leaves a hit for other requests. For this reason the scheduler
    ends the steps of a prompt at block boundaries and where a later request is likely to continue
    (the "align" mode of vLLM's Mamba cache).

    Keys and values can be hit in the step that computes them, because each layer writes before it
    reads. A state exists only after the step that computes it. A request that hits a state of the
    current step is therefore admitted in the next step.

    If hits may end inside a block, the state at the end of a prompt is published before its block
    is full. The request continues in this block, and a copy of it stays in the prefix index. A
    request that hits the state continues in another copy.
    """

    def __init__(
        self,
        group: int,
        spec: KVCacheGroup,
        pool: BlockPool,
        config: PoolConfig,
        *,
        uses_eagle: bool,
    ) -> None:
        super().__init__(group, spec, pool, config, uses_eagle=uses_eagle)
        self._num_speculative = spec.num_speculative_blocks
        self._published_in_step: set[BlockHash] = set()

    def num_missing(self, table: BlockTable, need: Need) -> int:
        return self._num_lacking(
            len(table.blocks),
            need.num_tokens,
            needs_copy=table.shared_tail is not None,
            has_state=table.has_state,
        )

    def num_missing_behind(self, hit: GroupHit, need: Need) -> int:
        """Also counts the block of a state that a KV connector loads. vLLM counts this block only
        if the step ends in the same block.
        """
        num_loaded, num_entries = 0, len(hit.blocks)
        if hit.num_computed_tokens > hit.num_tokens:
            num_entries = max(num_entries, -(-hit.num_computed_tokens // self._block_size))
            num_loaded = int(num_entries > len(hit.blocks))
        return num_loaded + self._num_behind_entries(hit, num_entries, need.num_tokens)

    def _num_behind_entries(self, hit: GroupHit, num_entries: int, num_tokens: int) -> int:
        return self._num_lacking(
            num_entries, num_tokens, needs_copy=self._needs_copy(hit), has_state=False
        )

    def num_reserved(self, table: BlockTable, num_slots: int) -> int:
        return self.num_missing(table, Need(num_slots, num_slots))

    def num_reserved_behind(self, hit: GroupHit, num_slots: int) -> int:
        return self._num_behind_entries(hit, len(hit.blocks), num_slots)

    def counted_hits(self, hit: GroupHit) -> Sequence[BlockId]:
        return hit.blocks

    def is_stored(self, hits: Sequence[BlockId]) -> bool:
        return not hits or self._index.hash_of(hits[-1]) not in self._published_in_step

    def end_of_load(self, hit: GroupHit, num_computed_tokens: int) -> int:  # noqa: ARG002
        """Returns the request's computed tokens, because it continues from the loaded state."""
        return hit.num_computed_tokens

    def begin_step(self) -> None:
        self._published_in_step.clear()

    def extend(self, table: BlockTable, need: Need) -> list[BlockId]:
        """Adds blocks for the state after the tokens and for the states after draft tokens. Blocks
        that the step skips get null entries. Blocks for draft tokens that are no longer needed at
        their positions move to the end of the table.
        """
        blocks, num_before = table.blocks, len(table.blocks)
        num_wanted = -(-need.num_tokens // self._block_size) + self._num_speculative
        copies = table.shared_tail is not None
        if num_wanted > num_before or copies:
            num_passed = num_wanted - self._num_speculative - 1
            blocks += [NULL_BLOCK] * (num_passed - num_before)
            if table.has_state:
                for position in range(
                    num_before - self._num_speculative, min(num_before, num_passed)
                ):
                    blocks.append(blocks[position])
                    blocks[position] = NULL_BLOCK
            num_new = max(0, num_wanted - len(blocks))
            new = self._pool.get_new_blocks(num_new + copies)
            if copies:
                self._copy_tail(table, new.pop(0))
            blocks += new
        table.has_state = True
        return blocks[num_before:]

    def publish(self, fillings: Iterable[Filling]) -> None:
        for tables, chain, num_tokens in fillings:
            table, end = tables[self._group], self._num_publishable(num_tokens)
            looked_at = self._publish_one(table, chain, end)
            self._publish_end_of_prompt(table, chain, end)
            hashes = (self._index.hash_of(table.blocks[position]) for position in looked_at)
            self._published_in_step.update(found for found in hashes if found is not None)

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:
        begin, end = positions.start, positions.stop
        size, interval = self._block_size, self._retention_interval
        if interval is None:
            return None
        kept = [False] * (end - begin)
        if interval:
            period = interval // size
            if period <= 1:
                return None
            kept = [(position + 1) % period == 0 for position in range(begin, end)]
        for boundary in boundaries:
            position = boundary // self._alignment * self._alignment // size - 1
            if begin <= position < end:
                kept[position - begin] = True
        return kept

    def _num_lacking(
        self, num_entries: int, num_tokens: int, *, needs_copy: bool, has_state: bool
    ) -> int:
        num_wanted = -(-num_tokens // self._block_size) + self._num_speculative
        num_states = 1 if has_state else 1 + self._num_speculative
        return min(max(0, num_wanted - num_entries), num_states) + needs_copy

    def _copy_tail(self, table: BlockTable, target: BlockId) -> None:
        position, table.shared_tail = table.shared_tail, None
        assert position is not None
        source = table.blocks[position]
        if not table.has_state:  # the state is a hit, and the request continues in the copy
            table.blocks[position] = target
            self._pool.copy(self._group, source, target, adds_holder_of=target)
            return
        # The request will overwrite its own state, so the copy takes its place in the prefix index.
        self._pool.move_hashes(self._group, source, target)
        self._pool.copy(self._group, source, target, adds_holder_of=source)
        moved = self._index.hash_of(target)
        if moved is not None:
            self._published_in_step.add(moved)

    def _publish_end_of_prompt(self, table: BlockTable, chain: Chain, num_tokens: int) -> None:
        """Publishes the state at the end of a step, if a later prompt is expected to continue there
        (see `last_state_position`). The state's block need not be full.
        """
        unit = self._hash_block_size
        if num_tokens <= 0 or num_tokens != last_state_position(
            chain.num_prompt_tokens, unit, drops_last=self._drops_last_hit_block
        ):
            return
        position = -(-num_tokens // self._block_size) - 1
        block = table.blocks[position] if position < len(table.blocks) else NULL_BLOCK
        if block == NULL_BLOCK or self._index.end_of(block) == num_tokens:
            return
        block_hash = chain.hashes[num_tokens // unit - 1]
        self._pool.publish_part(self._group, block_hash, block, num_tokens)
        self._published_in_step.add(block_hash)
        if num_tokens % self._block_size:
            table.shared_tail = table.num_published = position


def state_manager(
    group: int, spec: KVCacheGroup, pool: BlockPool, config: PoolConfig, *, uses_eagle: bool
) -> GroupManager:
    """Creates the manager of a state-space group, chosen by the group's cache mode."""
    manager = AlignedStateManager if spec.aligns_states else OverwrittenStateManager
    return manager(group, spec, pool, config, uses_eagle=uses_eagle)
