"""The queue of free blocks, in the order in which they are reused.

What vLLM keeps in one intrusive list has two parts that never mix: blocks without a hash are
freed to the front, blocks with one to the back, and only the latter are ever taken from the middle.
So the front is a stack, and the back a linked map from the least recently used on. Everything is
O(1) per block, and the stack moves in slices.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice

from services.common.pool.ids import BlockId


class FreeQueue:
    """Free blocks: first those that are blank, then those that are cached, oldest first."""

    __slots__ = ("_blank", "_cached")

    def __init__(self, blocks: Sequence[BlockId]) -> None:
        """All of `blocks` are blank; the first is reused first."""
        self._blank = list(reversed(blocks))
        self._cached: OrderedDict[BlockId, int] = OrderedDict()
        """Cached blocks with the time at which they became free."""

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached)

    def pop_blank(self, num_blocks: int) -> list[BlockId]:
        """Takes up to `num_blocks` blank blocks from the front."""
        if num_blocks == 0:
            return []
        blocks = self._blank[-num_blocks:]
        del self._blank[-num_blocks:]
        blocks.reverse()
        return blocks

    def pop_cached(self, num_blocks: int) -> tuple[list[BlockId], list[int]]:
        """Takes the `num_blocks` least recently used cached blocks, of at least as many. Returns
        them, and when each became free. The caller removes them from the index.
        """
        blocks = list(islice(self._cached, num_blocks))
        return blocks, list(map(self._cached.pop, blocks))

    def push_blank(self, blocks: Sequence[BlockId]) -> None:
        """Puts blocks without a hash at the front; the last one is reused first."""
        self._blank.extend(blocks)

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        """Puts blocks with a hash at the back; the last one is reused last."""
        cached = self._cached
        for block in blocks:
            cached[block] = now

    def push_mixed(self, blocks: Sequence[BlockId], has_hash: Sequence[bool], now: int) -> None:
        """Puts blocks without a hash at the front, the first one reused first, and those with one
        at the back.
        """
        blank = [block for block, found in zip(blocks, has_hash, strict=True) if not found]
        self._blank.extend(reversed(blank))
        self._cached.update(dict.fromkeys(compress(blocks, has_hash), now))

    def count_cached(self, blocks: Iterable[BlockId]) -> int:
        """How many of these are free and have a hash."""
        return sum(map(self._cached.__contains__, blocks))

    def is_cached(self, block: BlockId) -> bool:
        """Whether a block is free and has a hash."""
        return block in self._cached

    def remove_cached(self, blocks: Sequence[BlockId]) -> tuple[Sequence[BlockId], list[int]]:
        """Takes from the middle those of `blocks` that are cached and free.

        Returns the others, and when each of those taken became free.
        """
        cached = self._cached
        if cached.keys().isdisjoint(blocks):
            return blocks, []
        others = [block for block in blocks if block not in cached]
        return others, [cached.pop(block) for block in blocks if block in cached]

    def blank_all(self) -> None:
        """The hashes are gone: every block is blank now, in its place."""
        self._blank[:0] = reversed(self._cached)
        self._cached.clear()

    def order(self) -> list[BlockId]:
        """All free blocks, the next to be reused first."""
        return [*reversed(self._blank), *self._cached]

    def cached(self) -> list[BlockId]:
        """The free blocks with a hash, the next to be reused first."""
        return list(self._cached)


class ObservedFreeQueue(FreeQueue):
    """A queue that passes blocks that enter it to an observer, in the order of their freeing."""

    __slots__ = ("_observer",)

    def __init__(self, queue: FreeQueue, observer: Callable[[Sequence[BlockId]], None]) -> None:
        """Takes the blocks of another queue over."""
        self._blank, self._cached = queue._blank, queue._cached
        self._observer = observer

    def push_blank(self, blocks: Sequence[BlockId]) -> None:
        super().push_blank(blocks)
        self._observer(blocks[::-1])

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        entering = list(blocks)
        super().push_cached(entering, now)
        self._observer(entering)

    def push_mixed(self, blocks: Sequence[BlockId], has_hash: Sequence[bool], now: int) -> None:
        super().push_mixed(blocks, has_hash, now)
        self._observer(blocks)
