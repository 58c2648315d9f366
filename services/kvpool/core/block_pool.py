"""The blocks of a pool: free, in use, or cached."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import takewhile

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK, BlockId, ContextId
from services.common.pool.operations import BlockCopy
from services.kvpool.core.block_ages import BlockAges
from services.kvpool.core.events import BlocksRemoved, BlocksStored, Event, EventLog
from services.kvpool.core.free_queue import FreeQueue, MakeFreeQueue
from services.kvpool.core.prefix_index import PrefixIndex
from services.kvpool.core.retained_contexts import RetainingFreeQueue


@lru_cache(maxsize=1)
def _block_ids(num_blocks: int) -> Sequence[BlockId]:
    """The ids of all blocks except the null block. Pools of equal size share one list in memory."""
    return tuple(map(BlockId, range(1, num_blocks)))


class BlockPool:
    """Blocks 1 .. num_blocks-1. Block 0 is the null block and is never allocated.

    A block is either free, or it is in one or more block tables, which are its holders. A block is
    published when its hash is added to the prefix index. A published block keeps its hash when it
    is freed. Requests can hit the block until it is evicted, which means that it is allocated
    again. Reference counts are stored only for blocks with several holders, so that the allocation
    of a block needs no counting. The caller increments `ages.now` in each transaction.
    """

    def __init__(
        self, num_blocks: int, num_groups: int, make_free_queue: MakeFreeQueue = FreeQueue
    ) -> None:
        self.num_blocks = num_blocks
        self.ages = BlockAges(num_blocks)
        self._free = make_free_queue(_block_ids(num_blocks))
        self.contexts: RetainingFreeQueue | None = None
        """The queue `_free`, once it has contexts (blocks that are reused last). Else None."""
        self.indexes = tuple(PrefixIndex() for _ in range(num_groups))
        """The published blocks of each group. Only this class changes them."""
        self._shared: dict[BlockId, int] = {}
        """Maps blocks in several tables to their ref_cnt. Any other block's ref_cnt is 0 or 1."""
        self._copies: list[BlockCopy] = []
        self._new_copies: list[BlockCopy] = []
        self._events = EventLog()

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no table, cached blocks included."""
        return len(self._free)

    @property
    def num_cached_hashes(self) -> int:
        return sum(map(len, self.indexes))

    @property
    def num_index_changes(self) -> int:
        return sum(index.num_changes for index in self.indexes)

    def count_held_by(self, num_holders: int, blocks: Sequence[BlockId]) -> int:
        """The number of leading blocks that have `num_holders` holders. All must be in use."""
        ref_cnt = self._shared.get
        return sum(1 for _ in takewhile(lambda block: ref_cnt(block, 1) == num_holders, blocks))

    def count_free(self, cached_blocks: Iterable[BlockId]) -> int:
        return self._free.count_cached(cached_blocks)

    def get_new_blocks(self, num_blocks: int) -> list[BlockId]:
        """Allocates `num_blocks` blocks from the front of the free queue. The queue must contain
        that many blocks. An allocated block that was cached loses its hash.
        """
        blocks = self._free.pop_blank(num_blocks)
        if len(blocks) < num_blocks:
            blocks += self._evict(num_blocks - len(blocks))
        return blocks

    def touch(self, cached_blocks: Sequence[BlockId]) -> None:
        """Adds a holder to each of these published blocks. Free blocks leave the free queue."""
        held, free_since = self._free.remove_cached(cached_blocks)
        self.ages.reused(free_since)
        shared = self._shared
        for block in held:
            shared[block] = shared[block] + 1 if block in shared else 2

    def free(self, blocks: Sequence[BlockId], num_published: int) -> None:
        """Removes a holder from each block of a table. A block without holders enters the free
        queue. The first `num_published` blocks of the table are added at the back, the last one
        first, so that the end of a prefix is reused before its beginning. The remaining blocks are
        added at the front.
        """
        published = blocks[num_published - 1 :: -1] if num_published else []
        blank = blocks[num_published:]
        if self._shared and not self._shared.keys().isdisjoint(blocks):
            published = [block for block in published if self._drop_holder(block)]
            blank = [block for block in blank if self._drop_holder(block)]
        self._free.push_blank(blank)
        self._free.push_cached(published, self.ages.now)

    def free_in_order(self, group: int, blocks: Iterable[BlockId]) -> None:
        """Removes a holder from each of these blocks of a group, in order. Skips null entries. A
        block without holders is added to the back of the free queue if it has a hash, otherwise to
        the front.
        """
        hash_of = self.indexes[group].hash_of
        left = [block for block in blocks if block and self._drop_holder(block)]
        has_hash = [hash_of(block) is not None for block in left]
        self._free.push_mixed(left, has_hash, self.ages.now)

    def free_as_one_list(self, blocks: Iterable[tuple[int, BlockId]]) -> None:
        """Does the same as `free_in_order` for (group, block) pairs of several groups."""
        left = [(group, block) for group, block in blocks if block and self._drop_holder(block)]
        self._free.push_mixed(
            [block for _, block in left],
            [self.indexes[group].hash_of(block) is not None for group, block in left],
            self.ages.now,
        )

    def copy(
        self, group: int, source: BlockId, target: BlockId, *, adds_holder_of: BlockId
    ) -> None:
        """Records that the workers must copy a block of a group. Until `release_copies`, the copy
        counts as a holder of both blocks. This method adds the copy to the holders of
        `adds_holder_of`. For the other block, the caller must already have counted the copy.
        """
        self._shared[adds_holder_of] = self._shared.get(adds_holder_of, 1) + 1
        self._copies.append(BlockCopy(group, source, target))
        self._new_copies.append(self._copies[-1])

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Returns the copies recorded since the last call, ordered by group."""
        copies = tuple(sorted(self._new_copies, key=lambda copy: copy.group))
        self._new_copies = []
        return copies

    def release_copies(self, num_copies: int) -> None:
        """Ends the oldest `num_copies` copies, which then no longer count as holders."""
        copies, self._copies = self._copies[:num_copies], self._copies[num_copies:]
        ends = [
            (copy.group, block)
            for copy in sorted(copies, key=lambda copy: copy.group)
            for block in (copy.source, copy.target)
        ]
        self.free_as_one_list(ends)

    def retain(
        self, context: ContextId, blocks: Iterable[BlockId], *, is_whole: bool = False
    ) -> None:
        """Makes blocks in use a context, which is reused after all other free blocks. If
        `is_whole`, a later hit needs all these blocks. Does nothing in a simulation with its own
        free queue.
        """
        if self.contexts is None and type(self._free) is FreeQueue:
            self._free = self.contexts = RetainingFreeQueue(self._free)
        if self.contexts is not None:
            self.contexts.retain(context, blocks, is_whole=is_whole)

    def publish(self, group: int, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> None:
        """Publishes blocks in use that have no hash yet: `blocks[i]` under `hashes[i]`."""
        new = self.indexes[group].insert(hashes, blocks)
        self.ages.published(blocks)
        self._events.add(BlocksStored, group, new)

    def publish_whole(
        self, group: int, block_hash: BlockHash, block: BlockId, num_tokens: int
    ) -> None:
        """Publishes a block in use under the hash of all its tokens. The block ends with token
        number `num_tokens` of a sequence. Hashes of prefixes that end inside the block are removed.
        """
        index = self.indexes[group]
        self._events.add(BlocksRemoved, group, index.remove([block]))
        self._insert(group, block_hash, block, num_tokens)

    def publish_part(
        self, group: int, block_hash: BlockHash, block: BlockId, num_tokens: int
    ) -> None:
        """Adds the hash of a sequence's first `num_tokens` tokens to the hashes of a block in use.
        These tokens end inside the block. If the block was published for a shorter prefix before,
        the hashes for that prefix are removed.
        """
        index = self.indexes[group]
        if block_hash in index.hashes_of(block):
            return
        end = index.end_of(block)
        if end is not None and end < num_tokens:
            self._events.add(BlocksRemoved, group, index.remove([block]))
        self._insert(group, block_hash, block, num_tokens)

    def move_hashes(self, group: int, source: BlockId, target: BlockId) -> None:
        """Moves the hashes of `source` to `target`, its copy, which has no hash."""
        self.indexes[group].move(source, target)
        self.ages.published([target])

    def evict(self, blocks: Sequence[BlockId]) -> set[BlockId]:
        """Removes the hashes of blocks. Returns the blocks that had a hash. Free blocks among them
        are reused next, the last one first.
        """
        evicted: set[BlockId] = set()
        blocks = list(dict.fromkeys(blocks))
        free = [block for block in blocks if self._free.is_cached(block)]
        self._free.remove_cached(free)
        for group, index in enumerate(self.indexes):
            found = [block for block in blocks if index.hash_of(block) is not None]
            evicted.update(found)
            self._events.add(BlocksRemoved, group, index.remove(found))
        self._free.push_blank(free)
        return evicted

    def reset(self) -> bool:
        """Removes every hash and returns True. Returns False if any block is in use."""
        if len(self._free) < self.num_blocks - 1:
            return False
        for index in self.indexes:
            index.clear()
        self._free.blank_all()
        self.ages.num_resets += 1
        self._events.cleared()
        return True

    def take_events(self) -> tuple[Event, ...]:
        """Returns the events of all prefix indexes since the last call, in order."""
        return self._events.take()

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Returns every hash in the prefix indexes, as one event for each group."""
        return tuple(
            BlocksStored(group, tuple(index.hashes()))
            for group, index in enumerate(self.indexes)
            if len(index)
        )

    def free_block_ids(self) -> list[BlockId]:
        """All blocks in the free queue, in the order in which they will be allocated."""
        return self._free.order()

    @property
    def cached_block_ids(self) -> list[BlockId]:
        """Published blocks of all groups, free or in use."""
        return [block for index in self.indexes for block in index.blocks()]

    @property
    def shared_block_ids(self) -> list[BlockId]:
        return list(self._shared)

    def check(
        self, tables: Iterable[tuple[int, Sequence[BlockId], Sequence[Collection[BlockHash]]]]
    ) -> None:
        """Checks that every block is either in the free queue or in block tables of requests.
        `tables` has the group, the blocks, and the hashes allowed for each block of every table.
        Raises AssertionError. Tests call this method after each step.
        """
        holders: Counter[BlockId] = Counter()
        for group, blocks, hashes in tables:
            holders.update(blocks)
            self.indexes[group].check_table(blocks, hashes)
        del holders[NULL_BLOCK]
        for copy in self._copies:
            holders.update((copy.source, copy.target))
        order = self._free.order()
        free = set(order)
        assert len(order) == len(free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert free.isdisjoint(holders), "a block is both free and held"
        assert len(free) + len(holders) + 1 == self.num_blocks, "a block is lost"
        shared = {block: count for block, count in holders.items() if count > 1}
        assert shared == self._shared, "reference counts differ from the tables"
        self._check_indexes(free)

    def _check_indexes(self, free: set[BlockId]) -> None:
        cached: list[BlockId] = []
        for index in self.indexes:
            index.check()
            cached += index.blocks()
        distinct = set(cached)
        assert NULL_BLOCK not in distinct, "the null block is published"
        assert len(cached) == len(distinct), "a block is in two indexes"
        assert free & distinct == set(self._free.cached()), "the queue holds cached blocks wrongly"

    def _evict(self, num_blocks: int) -> list[BlockId]:
        blocks, free_since = self._free.pop_cached(num_blocks)
        self.ages.evicted(blocks, free_since)
        for group, index in enumerate(self.indexes):
            self._events.add(BlocksRemoved, group, index.remove(blocks))
        return blocks

    def _insert(self, group: int, block_hash: BlockHash, block: BlockId, num_tokens: int) -> None:
        if self.indexes[group].insert_at(block_hash, block, num_tokens):
            self._events.add(BlocksStored, group, [block_hash])
        self.ages.published([block])

    def _drop_holder(self, block: BlockId) -> bool:
        """Removes one holder of a block. Returns True if it was the last holder."""
        ref_cnt = self._shared.get(block, 1) - 1
        if ref_cnt > 1:
            self._shared[block] = ref_cnt
        else:
            self._shared.pop(block, None)
        return ref_cnt == 0
