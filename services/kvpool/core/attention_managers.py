from collections.abc import Iterable, Sequence

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId
from services.kvpool.core.group_manager import BlockTable, Chain, Filling, GroupManager


class FullAttentionManager(GroupManager):
    """Manages the tables of a group in which no block is freed before its request finishes."""

    def publish(self, fillings: Iterable[Filling]) -> None:
        if self._hash_block_size != self._block_size:
            for tables, chain, num_tokens in fillings:
                table, end = tables[self._group], self._num_publishable(num_tokens)
                self._publish_one(table, chain, end)
                self._publish_end_of_prompt(table, chain, end)
            return
        new_hashes: list[BlockHash] = []
        new_blocks: list[BlockId] = []
        for tables, chain, num_tokens in fillings:
            table = tables[self._group]
            end = self._num_publishable(num_tokens) // self._block_size
            end = min(end, len(chain.hashes), len(table.blocks))
            begin = table.num_published
            if end > begin:
                table.num_published = end
                new_hashes += chain.hashes[begin:end]
                new_blocks += table.blocks[begin:end]
        self._pool.publish(self._group, new_hashes, new_blocks)

    def free(self, table: BlockTable) -> None:
        if self._hash_block_size != self._block_size or table.evicted:
            self._pool.free_in_order(self._group, table.blocks[::-1])
        else:
            self._pool.free(table.blocks, table.num_published)

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:
        return self._pool.count_held_by(num_requests, table.blocks)

    def check(self, table: BlockTable, chain: Chain) -> None:
        super().check(table, chain)
        if self._hash_block_size == self._block_size:
            published = [self._index.hash_of(block) for block in table.blocks]
            expected: list[BlockHash | None] = [None] * len(published)
            expected[: table.num_published] = chain.hashes[: table.num_published]
            for position in table.evicted:
                expected[position] = None
            assert published == expected, "blocks are not under their hashes"

    def _publish_end_of_prompt(self, table: BlockTable, chain: Chain, num_tokens: int) -> None:
        """Adds to the prefix index the block inside which a prompt ends, under the hash of the last
        full hash block. The last token is left out, since an equal prompt computes it again.
        With a draft head (EAGLE), that token is included, and look-ups shorten the hit instead.
        """
        unit = self._hash_block_size
        longest = chain.num_prompt_tokens - (not self._uses_eagle)
        end = min(longest // unit, len(chain.hashes)) * unit
        position, offset = divmod(end, self._block_size)
        if 0 < end <= num_tokens and offset and position < len(table.blocks):
            self._pool.publish_part(
                self._group, chain.hashes[end // unit - 1], table.blocks[position], end
            )


class SlidingWindowManager(GroupManager):
    """Manages the tables of a group in which only the blocks of a request's last window stay
    allocated. If hits can end only at some of the blocks, because groups have different block sizes
    or `prefix_cache_retention_interval` is set, only windows before these ends enter the index.
    """

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:
        begin, end = positions.start, positions.stop
        size, interval = self._block_size, self._retention_interval
        if self._alignment % size:
            return None
        # If the last block of a hit is dropped, a window ends one block after the hit.
        shift = int(self._uses_eagle)
        num_wanted = -(-(self._spec.window - 1) // size) + shift
        kept = [False] * (end - begin)
        if interval != 0:
            period = (interval or self._alignment) // size
            if num_wanted >= period:
                return None
            for position in range(max(begin, shift), end):
                kept[position - begin] = (position - shift) % period >= period - num_wanted
        if interval is not None:
            for boundary in boundaries:
                last = boundary // self._alignment * self._alignment // size + shift
                for position in range(max(begin, last - num_wanted), min(end, last)):
                    kept[position - begin] = True
        return kept


class ChunkedLocalManager(GroupManager):
    """Manages the tables of a group in which requests keep the blocks of their current chunk."""
