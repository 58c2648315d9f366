"""State-space layers, with a recurrent state in place of keys and values. Used today by recorded
scenarios and tests of the scheduler; workers with such models will use it, and none has them yet.
"""

from collections.abc import Iterable, Sequence

from services.common.block_hash import BlockHash
from services.common.ids import NULL_BLOCK, BlockId
from services.kvpool.core.group_manager import BlockTable, Filling, GroupManager


class StateSpaceManager(GroupManager):
    """A block holds the state after the last token that was computed in it, and stands for all
    tokens up to there: a request needs one, and a second while a step leads from one to another.

    A step reads the state that the step before it left, and writes the last entry of the table.
    Blocks that it passes over have no state: their entries are null. A block can be found by its
    hash only if its state is the one at the end of the block, so only a step that ends there leaves
    a hit for other requests. The scheduler therefore cuts the steps of a prompt at block
    boundaries, and counts no lookahead in slots (the "align" mode of vLLM's Mamba cache).

    Keys and values can be found by a request that runs in the same step as the one that computes
    them, since each layer writes before it reads. A state exists only after the step. So a state is
    published not when its block is planned, but when a later Grow says that it is stored.
    """

    __slots__ = ()

    def num_missing(self, num_entries: int, num_slots: int) -> int:
        """One if the slots reach beyond the table, however far."""
        return int(-(-num_slots // self._block_size) > num_entries)

    def admit(self, hits: list[BlockId], num_computed_tokens: int) -> BlockTable:
        """A table that holds the hit: the state at the end of its last block."""
        table = super().admit(hits, num_computed_tokens)
        table.num_stored_tokens = num_computed_tokens
        return table

    def extend(self, table: BlockTable, num_slots: int) -> list[BlockId]:
        """Adds one block for the state after the slots, and null entries for those passed over."""
        num_passed = -(-num_slots // self._block_size) - len(table.blocks) - 1
        if num_passed < 0:
            return []
        if table.num_stored_tokens != len(table.blocks) * self._block_size:
            table.unpublished |= {len(table.blocks) - 1}
        entries = [NULL_BLOCK] * num_passed + self._pool.get_new_blocks(1)
        table.blocks += entries
        return entries

    def publish(self, fillings: Iterable[Filling]) -> None:
        """Publishes nothing: the states are planned, not stored yet."""

    def remove_skipped_blocks(
        self, table: BlockTable, hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Publishes the states that are stored, and frees those that were read."""
        table.num_stored_tokens = num_computed_tokens
        end = min(num_computed_tokens // self._block_size, len(hashes), len(table.blocks))
        if end - 1 in table.unpublished:
            end -= 1
        stored = [
            position
            for position in range(table.num_published, end)
            if table.blocks[position] and position not in table.unpublished
        ]
        self._pool.publish(
            self._group,
            [hashes[position] for position in stored],
            [table.blocks[position] for position in stored],
        )
        table.num_published = max(table.num_published, end)
        super().remove_skipped_blocks(table, hashes, num_computed_tokens)

    def _free_entries(self, table: BlockTable, begin: int, end: int) -> None:
        self._free_one_by_one(table.blocks[begin:end])
