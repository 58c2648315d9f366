"""Stores the latest batches of prefix-cache events, and the blocks that are cached now."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.common.errors import OutOfRange
from services.common.pool.block_hash import BlockHash
from services.scheduler.adapters.pool.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheNamespace,
    KVCacheEvent,
    KVEventBatch,
)

MAX_KEPT_BLOCKS = 500_000
"""Limit on the total number of blocks in the stored batches, which take about 70 MB."""


class Trimmed(OutOfRange):
    """The requested batches are no longer stored, or do not exist."""

    reason = "TRIMMED"


@dataclass(frozen=True, slots=True)
class _Block:
    parent: BlockHash | None
    token_ids: bytes
    namespace: CacheNamespace


_Key = tuple[int, BlockHash]
"""Index of a KV-cache group, and hash of a block."""


class KVEventLog:
    """Numbers batches (the events of one transaction each) from 0. Stores the last `num_batches`
    batches, or fewer if these contain more than `max_blocks` blocks. Also stores which blocks are
    published now. A reader that requests a batch which was dropped gets an error.
    """

    def __init__(
        self,
        num_batches: int,
        clock: Callable[[], float] = time.time,
        max_blocks: int = MAX_KEPT_BLOCKS,
    ) -> None:
        self.time = clock
        """Returns the time in seconds since 1970."""
        self._num_batches = num_batches
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._batches: deque[KVEventBatch] = deque()
        self._next = 0
        self._blocks: dict[_Key, _Block] = {}
        self._news = asyncio.Event()
        self.on_batch: Callable[[KVEventBatch], None] = lambda _: None

    @property
    def newest(self) -> int:
        """Number of the newest batch. -1 if there is no batch yet."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is stored."""
        return self._next - len(self._batches)

    def append(self, events: tuple[KVCacheEvent, ...]) -> None:
        batch = KVEventBatch(self._next, self.time(), events)
        self._next += 1
        self._batches.append(batch)
        self._num_blocks += _num_blocks(batch)
        while len(self._batches) > self._num_batches or self._num_blocks > self._max_blocks:
            self._num_blocks -= _num_blocks(self._batches.popleft())
        for event in events:
            self._apply(event)
        self.on_batch(batch)
        self._news.set()
        self._news = asyncio.Event()

    def batches(self, begin: int) -> list[KVEventBatch]:
        """The batches from number `begin` on. Raises Trimmed if batch `begin` is not stored."""
        if not self.oldest <= begin <= self._next:
            raise Trimmed(
                f"batch {begin} of KV events is not stored here: stored are {self.oldest} to "
                f"{self.newest}",
                field="start_sequence_number",
            )
        return [self._batches[index] for index in range(begin - self.oldest, len(self._batches))]

    async def after(self, sequence: int) -> list[KVEventBatch]:
        """Waits for batches after number `sequence`. Raises Trimmed if the first was dropped."""
        while sequence >= self.newest:
            await self._news.wait()
        return self.batches(sequence + 1)

    def snapshot(self) -> list[BlockStored]:
        """All published blocks, each after its parent (the block before it in a sequence)."""
        listed: dict[_Key, None] = {}
        for key in self._blocks:
            listed.update(dict.fromkeys(reversed(list(self._unlisted(key, listed)))))
        return list(self._runs(listed))

    def _apply(self, event: KVCacheEvent) -> None:
        match event:
            case BlockStored(hashes, parent, token_ids, group, namespace):
                size = len(token_ids) // len(hashes)
                for index, block_hash in enumerate(hashes):
                    tokens = token_ids[index * size : (index + 1) * size]
                    self._blocks[group, block_hash] = _Block(parent, tokens, namespace)
                    parent = block_hash
            case BlockRemoved(hashes, group):
                for block_hash in hashes:
                    self._blocks.pop((group, block_hash), None)
            case AllBlocksCleared():
                self._blocks.clear()

    def _unlisted(self, key: _Key, listed: dict[_Key, None]) -> Iterator[_Key]:
        """Yields a block and its ancestors, up to the first one that is listed or not published."""
        group = key[0]
        while key in self._blocks and key not in listed:
            yield key
            parent = self._blocks[key].parent
            if parent is None:
                return
            key = (group, parent)

    def _runs(self, keys: dict[_Key, None]) -> Iterator[BlockStored]:
        """Yields an event for each chain of blocks of equal size, each the parent of the next."""
        run: list[_Key] = []
        for key in keys:
            if run and not self._follows(key, run[-1]):
                yield self._event(run)
                run = []
            run.append(key)
        if run:
            yield self._event(run)

    def _follows(self, key: _Key, before: _Key) -> bool:
        block = self._blocks[key]
        is_child = (key[0], block.parent) == before
        return is_child and len(block.token_ids) == len(self._blocks[before].token_ids)

    def _event(self, run: list[_Key]) -> BlockStored:
        first = self._blocks[run[0]]
        return BlockStored(
            block_hashes=tuple(block_hash for _, block_hash in run),
            parent_block_hash=first.parent,
            token_ids=b"".join(self._blocks[key].token_ids for key in run),
            group_idx=run[0][0],
            namespace=first.namespace,
        )


def _num_blocks(batch: KVEventBatch) -> int:
    return sum(
        len(event.block_hashes) for event in batch.events if not isinstance(event, AllBlocksCleared)
    )
