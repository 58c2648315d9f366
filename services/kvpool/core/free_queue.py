"""The queue of free blocks, in the order in which they are reused.

vLLM stores free blocks in one linked list. Blocks without a hash are added at the front, blocks
with a hash at the back, and only blocks with a hash are removed from the middle. Therefore the two
sets never mix, and here they are stored separately: a stack of blocks without a hash, and an
ordered map of blocks with a hash, least recently used first. Each operation takes O(1) time per
block. The stack adds and removes several blocks as one slice.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice

from services.common.pool.ids import BlockId


class FreeQueue:
    """The free blocks: blank blocks (without a hash) before cached blocks, oldest first."""

    __slots__ = ("_blank", "_cached")

    def __init__(self, blocks: Sequence[BlockId]) -> None:
        """Starts with `blocks`, which are all blank. The first of them is reused first."""
        self._blank = list(reversed(blocks))
        self._cached: OrderedDict[BlockId, int] = OrderedDict()
        """Maps each cached block to the time at which it was freed."""

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached)

    def pop_blank(self, num_blocks: int) -> list[BlockId]:
        """Removes and returns up to `num_blocks` blank blocks from the front."""
        if num_blocks == 0:
            return []
        blocks = self._blank[-num_blocks:]
        del self._blank[-num_blocks:]
        blocks.reverse()
        return blocks

    def pop_cached(self, num_blocks: int) -> tuple[list[BlockId], list[int]]:
        """Removes the `num_blocks` least recently used cached blocks. The queue must contain that
        many. Returns the blocks, and the time at which each was freed. The caller removes the
        blocks from the prefix index.
        """
        blocks = list(islice(self._cached, num_blocks))
        return blocks, list(map(self._cached.pop, blocks))

    def push_blank(self, blocks: Sequence[BlockId]) -> None:
        """Adds blocks without a hash to the front. The last of them is reused first."""
        self._blank.extend(blocks)

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        """Adds blocks with a hash to the back. The last of them is reused last."""
        cached = self._cached
        for block in blocks:
            cached[block] = now

    def push_mixed(self, blocks: Sequence[BlockId], has_hash: Sequence[bool], now: int) -> None:
        """Adds blocks without a hash to the front and blocks with a hash to the back. Among the
        added blocks without a hash, the first is reused first.
        """
        blank = [block for block, found in zip(blocks, has_hash, strict=True) if not found]
        self._blank.extend(reversed(blank))
        self._cached.update(dict.fromkeys(compress(blocks, has_hash), now))

    def count_cached(self, blocks: Iterable[BlockId]) -> int:
        """The number of these blocks that are free and have a hash."""
        return sum(map(self._cached.__contains__, blocks))

    def is_cached(self, block: BlockId) -> bool:
        """Whether a block is free and has a hash."""
        return block in self._cached

    def remove_cached(self, blocks: Sequence[BlockId]) -> tuple[Sequence[BlockId], list[int]]:
        """Removes those `blocks` that are cached and free, from anywhere in the queue. Returns the
        blocks that were not removed, and the times at which the removed blocks were freed.
        """
        cached = self._cached
        if cached.keys().isdisjoint(blocks):
            return blocks, []
        others = [block for block in blocks if block not in cached]
        return others, [cached.pop(block) for block in blocks if block in cached]

    def blank_all(self) -> None:
        """Makes every cached block blank, without changing the order of reuse."""
        self._blank[:0] = reversed(self._cached)
        self._cached.clear()

    def order(self) -> list[BlockId]:
        """All free blocks, in the order in which they will be reused."""
        return [*reversed(self._blank), *self._cached]

    def cached(self) -> list[BlockId]:
        """The free blocks with a hash, in the order in which they will be reused."""
        return list(self._cached)


MakeFreeQueue = Callable[[Sequence[BlockId]], FreeQueue]
"""Makes the queue of a pool whose blocks are all blank."""
