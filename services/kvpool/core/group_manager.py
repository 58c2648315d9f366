"""How a group of layers holds blocks.

A group has a block table for each request. What a query can see decides which blocks a request
needs, which are freed while it runs, and which make a prefix hit; so each kind of attention has its
manager, and a coordinator calls them all. vLLM's hybrid KV-cache manager divides the work in the
same way.

Everything follows from one rule of the kind, `KVCacheGroup.first_seen_block`: a request that has
computed n tokens needs the blocks from there on and no earlier one. Earlier ones are freed while it
runs, and a prefix of n tokens is a hit if the blocks from there on are cached, even if earlier ones
are not. Table entries that hold nothing name the null block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash
from services.common.ids import NULL_BLOCK, BlockId
from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.block_pool import BlockPool


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group, in the order of its tokens.

    The first `num_null` entries are the null block. Of the first `num_published`, those that are
    not null nor in `unpublished` are in the index; later ones are not. Entries in `unpublished` are
    never published again: their hash was evicted, or they hold a state and the request went on to
    another block before the end of theirs. Where blocks hold states, `num_stored_tokens` is the
    number of tokens whose state is stored.
    """

    blocks: list[BlockId] = field(default_factory=list)
    num_published: int = 0
    num_null: int = 0
    num_stored_tokens: int = 0
    unpublished: frozenset[int] = frozenset()

    def published(self, hashes: Sequence[BlockHash]) -> list[BlockHash | None]:
        """The hashes of the leading entries that were published, of those of all full blocks; None
        for one that is not in the index.
        """
        return [
            None if position in self.unpublished else block_hash
            for position, block_hash in enumerate(hashes[: self.num_published])
        ]


Filling = tuple[BlockTable, Sequence[BlockHash], int]
"""A table, the hashes of its request's full blocks, and the number of tokens stored."""


class GroupManager:
    """The tables of one group: of sliding windows and of chunked local attention. Full attention
    and state-space layers have subclasses.

    With `drop_last_hit_block`, a hit must have one more cached block behind it, which is computed
    again: a draft head (EAGLE) reads the hidden states at the end of the prompt, and those are not
    stored.
    """

    __slots__ = ("_block_size", "_group", "_index", "_num_dropped", "_pool", "_spec", "frees_early")

    def __init__(
        self, group: int, spec: KVCacheGroup, pool: BlockPool, *, drop_last_hit_block: bool
    ) -> None:
        self.frees_early = spec.attention_type is not AttentionType.FULL
        """Whether earlier blocks of a request are freed while it runs."""
        self._group = group
        self._spec = spec
        self._block_size = spec.block_size
        self._pool = pool
        self._index = pool.indexes[group]
        keeps_states = spec.attention_type is AttentionType.STATE_SPACE  # a draft head reads none
        self._num_dropped = int(drop_last_hit_block and not keeps_states)

    def num_missing(self, num_entries: int, num_slots: int) -> int:
        """Blocks that a table of so many entries lacks to hold so many token slots."""
        return max(0, -(-num_slots // self._block_size) - num_entries)

    def num_reserved(self, hits: Sequence[BlockId], num_slots: int, num_step_tokens: int) -> int:
        """Blocks that a request lacks besides its hits to reach so many slots, step by step."""
        num_held = len(hits) - self._spec.first_seen_block(len(hits) * self._block_size)
        most = max(0, self._spec.max_held_blocks(num_slots, num_step_tokens) - num_held)
        return min(self.num_missing(len(hits), num_slots), most)

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], depth: int) -> list[BlockId]:
        """A table for the longest prefix of at most `depth` whole blocks that is a hit.

        Looks from the right, and starts again before each block that is missing, so that every hash
        is looked up at most once.
        """
        find = self._index.find
        end = min(depth, len(hashes) - self._num_dropped)
        while end > 0:
            begin = self._spec.first_seen_block(end * self._block_size)
            seen: list[BlockId] = []
            for position in range(end + self._num_dropped - 1, begin - 1, -1):
                block = find(hashes[position])
                if block is None:
                    end = position - self._num_dropped
                    break
                seen.append(block)
            else:
                seen.reverse()
                return [NULL_BLOCK] * begin + seen[: end - begin]
        return []

    def first_seen_block(self, num_tokens: int) -> int:
        """The first block that a query from position `num_tokens` on can see."""
        return self._spec.first_seen_block(num_tokens)

    def admit(self, hits: list[BlockId], num_computed_tokens: int) -> BlockTable:
        """A table that holds those of the hits that a query behind the computed tokens sees; takes
        the list over.
        """
        num_null = self._spec.first_seen_block(num_computed_tokens)
        if num_null:
            hits = [NULL_BLOCK] * num_null + hits[num_null:]
        self._pool.touch(hits[num_null:] if num_null else hits)
        return BlockTable(hits, len(hits), num_null)

    def extend(self, table: BlockTable, num_slots: int) -> list[BlockId]:
        """Adds what a table lacks to hold so many slots; it must be free. Returns the entries."""
        entries = self._pool.get_new_blocks(self.num_missing(len(table.blocks), num_slots))
        table.blocks += entries
        return entries

    def remove_skipped_blocks(
        self,
        table: BlockTable,
        hashes: Sequence[BlockHash],  # noqa: ARG002 - for managers that publish here
        num_computed_tokens: int,
    ) -> None:
        """Frees the blocks that no query from `num_computed_tokens` on can see."""
        end = min(self._spec.first_seen_block(num_computed_tokens), len(table.blocks))
        begin = table.num_null
        if end > begin:
            self._free_entries(table, begin, end)
            table.blocks[begin:end] = [NULL_BLOCK] * (end - begin)
            table.num_null = end

    def publish(self, fillings: Iterable[Filling]) -> None:
        """Publishes the blocks of tables that lie wholly below so many tokens and have a hash."""
        new_hashes: list[BlockHash] = []
        new_blocks: list[BlockId] = []
        for table, hashes, num_tokens in fillings:
            end = min(num_tokens // self._block_size, len(hashes), len(table.blocks))
            begin = table.num_published
            if end > begin:
                table.num_published = end
                begin = max(begin, table.num_null)
                new_hashes += hashes[begin:end]
                new_blocks += table.blocks[begin:end]
        self._pool.publish(self._group, new_hashes, new_blocks)

    def free(self, table: BlockTable) -> None:
        """Frees every block of a table."""
        self._free_entries(table, table.num_null, len(table.blocks))

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:  # noqa: ARG002
        """Leading blocks of a table that all requests hold; 0 if blocks are freed early."""
        return 0

    def _free_entries(self, table: BlockTable, begin: int, end: int) -> None:
        if table.unpublished:
            self._free_one_by_one(table.blocks[begin:end])
        else:
            self._pool.free(
                table.blocks[begin:end], min(max(0, table.num_published - begin), end - begin)
            )

    def _free_one_by_one(self, blocks: Sequence[BlockId]) -> None:
        """Frees blocks some of which are published, in any order, and some null."""
        held = [block for block in blocks if block]
        published = [block for block in held if self._index.hash_of(block) is not None]
        others = [block for block in held if self._index.hash_of(block) is None]
        self._pool.free(published + others, len(published))


class FullAttentionManager(GroupManager):
    """A request holds all its blocks until it ends, and a hit is a cached prefix."""

    __slots__ = ()

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], depth: int) -> list[BlockId]:
        """The longest cached prefix: found from the left, since a chain breaks only once."""
        blocks = self._index.find_prefix(hashes, depth + self._num_dropped)
        return blocks[:-1] if self._num_dropped else blocks

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:
        return self._pool.count_held_by(num_requests, table.blocks)
