"""Retains contexts: free blocks that are reused after all other free blocks.

A context consists of the cached blocks of a finished request, in order. The scheduler expects a
later request to begin with the tokens of these blocks. Contexts only determine an order of reuse:
their blocks are free and can be hit like all cached blocks, so no allocation fails for a context.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from services.common.pool.ids import BlockId, ContextId
from services.common.pool.operations import ContextBlocks
from services.kvpool.core.free_queue import FreeQueue


class RetainingFreeQueue(FreeQueue):
    """A free queue with contexts. Blank blocks (without a hash) are reused first. Cached blocks in
    no context follow, the oldest first, then the contexts in order, each from its end. A block in
    several contexts is reused with the last of them. A block in use stays in its contexts. When a
    block of a *whole* context is reused, the context ends, because a hit needs all its blocks.
    """

    __slots__ = ("_changed", "_contexts", "_free", "_num_contexts", "_num_own", "_sums", "_whole")

    def __init__(self, queue: FreeQueue) -> None:
        """Takes over the blocks of a queue without contexts."""
        self._blank, self._cached = queue._blank, queue._cached
        self._contexts: dict[ContextId, list[BlockId]] = {}
        """The blocks of each context, in the order of reuse of the contexts."""
        self._num_contexts: dict[BlockId, int] = {}
        """For each block in a context, the number of its contexts."""
        self._sums: dict[BlockId, int] = {}
        """For each block in a context, the sum of its contexts' ids: the id if it has one context.
        """
        self._free: dict[BlockId, int] = {}
        """Maps each free block in a context to the time at which it was freed."""
        self._num_own: Counter[ContextId] = Counter()
        self._changed: dict[ContextId, None] = {}
        self._whole: set[ContextId] = set()

    def __len__(self) -> int:
        return super().__len__() + len(self._free)

    @property
    def num_retained(self) -> int:
        return len(self._free)

    @property
    def retained(self) -> Collection[BlockId]:
        return self._free.keys()

    @property
    def ids(self) -> list[ContextId]:
        """The ids of the contexts with blocks, in the order in which their blocks are reused."""
        return [context for context, owned in self._contexts.items() if owned]

    def retain(
        self, context: ContextId, blocks: Iterable[BlockId], *, is_whole: bool = False
    ) -> None:
        """Makes blocks in use a context, which is reused last. Drops an older one of this id."""
        self.drop([context])
        if not (owned := list(blocks)):
            return
        self._contexts[context] = owned
        self._changed[context] = None
        if is_whole:
            self._whole.add(context)
        num_contexts, sums = self._num_contexts, self._sums
        for block in owned:
            if block in num_contexts:
                num_contexts[block] += 1
                sums[block] += context
            else:
                num_contexts[block] = 1
                sums[block] = context

    def rank(self, contexts: Iterable[ContextId]) -> None:
        """Makes `contexts` the first contexts in the order of reuse, in the given sequence."""
        known = self._contexts
        ranked = {context: known.pop(context) for context in contexts if context in known}
        self._contexts = ranked | known

    def drop(self, contexts: Iterable[ContextId]) -> None:
        """Ends contexts. Their free blocks become ordinary cached blocks, as if freed now.
        Other ordinary blocks are reused first, because programs may begin with the same tokens.
        """
        for context in contexts:
            owned, num_contexts = self._contexts.pop(context, ()), self._num_contexts
            only_here = [block for block in owned if num_contexts[block] == 1]
            for block in [block for block in owned if num_contexts[block] > 1]:
                self._leave(context, block)
            for block in only_here:
                del num_contexts[block], self._sums[block]
            for block in [block for block in reversed(only_here) if block in self._free]:
                self._cached[block] = self._free.pop(block)
            self._forget(context)

    def take_changes(self) -> tuple[ContextBlocks, ...]:
        """Returns how many blocks are left in each context that has changed since the last call."""
        changed, self._changed = self._changed, {}
        return tuple(
            ContextBlocks(context, len(self._contexts.get(context, ())), self._num_own[context])
            for context in changed
        )

    def pop_cached(self, num_blocks: int) -> tuple[list[BlockId], list[int]]:
        blocks, free_since = super().pop_cached(min(num_blocks, len(self._cached)))
        while len(blocks) < num_blocks:
            context, owned = next(iter(self._contexts.items()))
            if context in self._whole:
                self.drop([context])
                more, times = super().pop_cached(min(num_blocks - len(blocks), len(self._cached)))
                blocks += more
                free_since += times
                continue
            while owned and len(blocks) < num_blocks:
                block = owned.pop()
                since = self._leave(context, block)
                if since is not None:
                    blocks.append(block)
                    free_since.append(since)
            self._changed[context] = None
            if not owned:
                del self._contexts[context]
                self._forget(context)
        return blocks, free_since

    def push_blank(self, blocks: Sequence[BlockId]) -> None:
        if self._contexts:
            self._forget_blocks(blocks)
        super().push_blank(blocks)

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        if self._contexts:
            blocks = self._keep(list(blocks), now)
        super().push_cached(blocks, now)

    def push_mixed(self, blocks: Sequence[BlockId], has_hash: Sequence[bool], now: int) -> None:
        if self._contexts:
            self._forget_blocks(
                block for block, found in zip(blocks, has_hash, strict=True) if not found
            )
            self._keep([one for one, found in zip(blocks, has_hash, strict=True) if found], now)
            others = [
                (block, found)
                for block, found in zip(blocks, has_hash, strict=True)
                if block not in self._free
            ]
            blocks, has_hash = [block for block, _ in others], [found for _, found in others]
        super().push_mixed(blocks, has_hash, now)

    def count_cached(self, blocks: Iterable[BlockId]) -> int:
        blocks = list(blocks)
        return super().count_cached(blocks) + self.count_retained(blocks)

    def is_cached(self, block: BlockId) -> bool:
        return super().is_cached(block) or block in self._free

    def count_retained(self, blocks: Iterable[BlockId]) -> int:
        """The number of these blocks that are free and in a context."""
        return sum(map(self._free.__contains__, blocks))

    def remove_cached(self, blocks: Sequence[BlockId]) -> tuple[Sequence[BlockId], list[int]]:
        free = self._free
        if free.keys().isdisjoint(blocks):
            return super().remove_cached(blocks)
        kept = [block for block in blocks if block in free]
        others = blocks if len(kept) == len(blocks) else [one for one in blocks if one not in free]
        times = [free.pop(block) for block in kept]
        self._count_own(kept, -1)
        if len(kept) == len(blocks):
            return [], times
        others, cached_times = super().remove_cached(others)
        return others, [*times, *cached_times]

    def blank_all(self) -> None:
        self._blank[:0] = reversed(self.cached())
        self._cached.clear()
        self._free.clear()
        self._num_contexts.clear()
        self._sums.clear()
        self._changed.update(dict.fromkeys(self._contexts))
        self._contexts.clear()
        self._num_own.clear()
        self._whole.clear()

    def order(self) -> list[BlockId]:
        return [*reversed(self._blank), *self.cached()]

    def cached(self) -> list[BlockId]:
        left, retained = dict(self._num_contexts), []
        for owned in self._contexts.values():
            for block in reversed(owned):
                left[block] -= 1
                if not left[block] and block in self._free:
                    retained.append(block)
        return [*self._cached, *retained]

    def _keep(self, blocks: Sequence[BlockId], now: int) -> list[BlockId]:
        """Records when blocks of contexts were freed. Returns the blocks that are in no context."""
        known = self._num_contexts
        kept = [block for block in blocks if block in known]
        self._free.update(dict.fromkeys(kept, now))
        self._count_own(kept, 1)
        return [block for block in blocks if block not in known]

    def _leave(self, context: ContextId, block: BlockId) -> int | None:
        """Removes a block from a context. If the block is free and in no other context, removes it
        from the queue too, and returns the time at which it was freed.
        """
        self._num_contexts[block] -= 1
        self._sums[block] -= context
        if self._num_contexts[block]:
            if block in self._free:
                self._count_own([block], 1)
            return None
        del self._num_contexts[block], self._sums[block]
        if block not in self._free:
            return None
        self._num_own[context] -= 1
        return self._free.pop(block)

    def _count_own(self, blocks: Sequence[BlockId], more: int) -> None:
        """For each block that is in one context only, adds `more` to the context's `_num_own`."""
        num_contexts, sums = self._num_contexts, self._sums
        owners = Counter([sums[block] for block in blocks if num_contexts[block] == 1])
        for owner, number in owners.items():
            context = ContextId(owner)
            self._num_own[context] += more * number
            self._changed[context] = None

    def _forget(self, context: ContextId) -> None:
        self._changed[context] = None
        del self._num_own[context]
        self._whole.discard(context)

    def _forget_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Removes blocks, which have lost their hashes, from all contexts."""
        lost = {block for block in blocks if block in self._num_contexts}
        if not lost:
            return
        if self._whole:
            self.drop([one for one in self._whole if not lost.isdisjoint(self._contexts[one])])
            lost &= self._num_contexts.keys()
        for context, owned in list(self._contexts.items()):
            left = [block for block in owned if block not in lost]
            if len(left) < len(owned):
                owned[:] = left
                self._changed[context] = None
                if not left:
                    del self._contexts[context]
                    self._forget(context)
        for block in lost:
            del self._num_contexts[block], self._sums[block]
