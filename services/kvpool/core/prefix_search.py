"""Searches the KV-cache groups of a pool for prefix hits.

Groups with the same attention type and parameters form a set, which is searched by one
`PrefixSearch`. A block counts as cached only if each group of the set has a block with its hash. A
search returns a table for each group and the number of hit tokens. Table entries that the request
does not need to read are the null block. The rules are those of vLLM's managers.

A chain has a hash at every multiple of the hash block size. Each hash covers all tokens before its
position. If a group's blocks are larger than a hash block, the hash of a block is therefore the
chain's hash at the end of the block.
"""

from collections.abc import Callable, Sequence

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK, BlockId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.prefix_index import PrefixIndex

GroupHits = tuple[list[list[BlockId]], int]
"""A table for each group, and the number of hit tokens."""


class PrefixSearch:
    """Finds the longest hit of groups with the same attention type and parameters. Each attention
    type has a subclass.
    """

    def __init__(
        self,
        spec: KVCacheGroup,
        indexes: Sequence[PrefixIndex],
        *,
        hash_block_size: int,
        alignment: int,
    ) -> None:
        self.spec = spec
        self.indexes = list(indexes)
        self._block_size = spec.block_size
        self._hash_block_size = hash_block_size
        self._hashes_per_block = spec.block_size // hash_block_size
        self._alignment = alignment
        """The length of a hit must be a multiple of this number of tokens."""

    def find(self, chain: Sequence[BlockHash], max_tokens: int, *, drop_last: bool) -> GroupHits:
        """Returns the longest hit of up to `max_tokens` tokens. With `drop_last`, a further cached
        block must follow the hit, but is not part of it. The request computes that block again.
        """
        raise NotImplementedError

    def eagle_margin(self) -> int:
        """The number of tokens after a hit that are looked up and dropped for a draft head."""
        return self._block_size

    def _blocks_at(self, chain: Sequence[BlockHash], num_tokens: int) -> list[BlockId] | None:
        """For each group, the cached block that ends at token `num_tokens`. None if any group lacks
        it.
        """
        position = num_tokens // self._hash_block_size - 1
        if position >= len(chain):
            return None
        blocks = [index.find(chain[position]) for index in self.indexes]
        return None if None in blocks else [block for block in blocks if block is not None]

    def _num_whole_blocks(self, chain: Sequence[BlockHash], max_tokens: int) -> int:
        return min(max_tokens, len(chain) * self._hash_block_size) // self._block_size

    def _nulls(self, num_blocks: int) -> list[list[BlockId]]:
        return [[NULL_BLOCK] * num_blocks for _ in self.indexes]


class FullSearch(PrefixSearch):
    """The search for full attention. A hit ends before the first block that is not cached."""

    def find(self, chain: Sequence[BlockHash], max_tokens: int, *, drop_last: bool) -> GroupHits:
        tables = self._whole_blocks(chain, max_tokens)
        num_tokens = len(tables[0]) * self._block_size
        if self._alignment < self._block_size:
            num_tokens = self._extend_into_block(chain, max_tokens, tables, num_tokens)
        if drop_last and num_tokens:
            num_tokens -= min(self._alignment, self._block_size)
        num_tokens -= num_tokens % self._alignment
        num_blocks = -(-num_tokens // self._block_size)
        for table in tables:
            del table[num_blocks:]
        return tables, num_tokens

    def eagle_margin(self) -> int:
        return min(self._alignment, self._block_size)

    def _whole_blocks(self, chain: Sequence[BlockHash], max_tokens: int) -> list[list[BlockId]]:
        step = self._hashes_per_block
        hashes = chain if step == 1 else chain[step - 1 :: step]
        num_blocks = max_tokens // self._block_size
        tables = [index.find_prefix(hashes, num_blocks) for index in self.indexes]
        shortest = min(map(len, tables))
        for table in tables:
            del table[shortest:]
        return tables

    def _extend_into_block(
        self,
        chain: Sequence[BlockHash],
        max_tokens: int,
        tables: list[list[BlockId]],
        num_tokens: int,
    ) -> int:
        """Appends the block inside which a cached prefix ends, if any. Returns the hit's length."""
        unit = self._alignment
        longest = min(num_tokens + self._block_size - unit, max_tokens, len(chain) * unit)
        for end in range(longest // unit * unit, num_tokens, -unit):
            blocks = self._blocks_at(chain, end)
            if blocks is not None:
                for table, block in zip(tables, blocks, strict=True):
                    table.append(block)
                return end
        return num_tokens


class WindowSearch(PrefixSearch):
    """The search for sliding windows, which runs from the end of the chain to its beginning. Only
    the blocks in the last window of a hit must be cached, or all blocks of a shorter hit.
    """

    def find(self, chain: Sequence[BlockHash], max_tokens: int, *, drop_last: bool) -> GroupHits:
        size = self._block_size
        num_wanted = -(-(self.spec.window - 1) // size) + drop_last
        # The window's blocks, last position first. An item has the blocks of all groups.
        run: list[list[BlockId]] = []
        begin = 0
        for position in range(self._num_whole_blocks(chain, max_tokens) - 1, -1, -1):
            blocks = self._blocks_at(chain, (position + 1) * size)
            if blocks is None:
                run.clear()
                continue
            if not run and (position + 1 - drop_last) * size % self._alignment:
                continue
            run.append(blocks)
            if len(run) == num_wanted:
                begin = position
                break
        tables = [
            [NULL_BLOCK] * begin + [blocks[group] for blocks in reversed(run)]
            for group in range(len(self.indexes))
        ]
        num_blocks = begin + len(run)
        if len(run) < num_wanted:
            num_blocks = self._aligned(num_blocks)
        if drop_last and num_blocks:
            num_blocks = self._aligned(num_blocks - 1)
        for table in tables:
            del table[num_blocks:]
        return tables, num_blocks * size

    def _aligned(self, num_blocks: int) -> int:
        """Rounds `num_blocks` down to a possible end of a hit."""
        return (
            num_blocks * self._block_size // self._alignment * self._alignment // self._block_size
        )


class ChunkSearch(PrefixSearch):
    """The search for chunked local attention. Only the chunk of the next token must be cached.
    Earlier chunks are not read any more, so they are part of a hit even if they are not cached.
    """

    def find(self, chain: Sequence[BlockHash], max_tokens: int, *, drop_last: bool) -> GroupHits:
        if drop_last:
            raise AssertionError("chunked local attention cannot be used with drop_last_hit_block")
        size = self._block_size
        max_tokens = min(max_tokens, len(chain) * self._hash_block_size)
        begin = max_tokens // self.spec.window * self.spec.window // size
        tables = self._nulls(begin)
        for position in range(begin, max_tokens // size):
            blocks = self._blocks_at(chain, (position + 1) * size)
            if blocks is None:
                break
            for table, block in zip(tables, blocks, strict=True):
                table.append(block)
        return tables, len(tables[0]) * size


class StateSearch(PrefixSearch):
    """The search for state-space layers. Only the state at the end of a hit must be cached."""

    def find(
        self,
        chain: Sequence[BlockHash],
        max_tokens: int,
        *,
        drop_last: bool,  # noqa: ARG002
    ) -> GroupHits:
        size = self._block_size
        unit = self._alignment if self._alignment < size else size
        longest = min(max_tokens, len(chain) * self._hash_block_size) // unit * unit
        for end in range(longest, 0, -unit):
            if end % self._alignment:
                continue
            blocks = self._blocks_at(chain, end)
            if blocks is not None:
                tables = self._nulls(-(-end // size) - 1)
                for table, block in zip(tables, blocks, strict=True):
                    table.append(block)
                return tables, end
        return self._nulls(0), 0

    def eagle_margin(self) -> int:
        return 0


SEARCHES: dict[AttentionType, Callable[..., PrefixSearch]] = {
    AttentionType.FULL: FullSearch,
    AttentionType.SLIDING_WINDOW: WindowSearch,
    AttentionType.CHUNKED_LOCAL: ChunkSearch,
    AttentionType.STATE_SPACE: StateSearch,
}
