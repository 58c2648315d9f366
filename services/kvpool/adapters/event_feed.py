"""The streams of WatchEvents, each with a bounded queue: gateways follow by them what a pool caches
where there is no Redis.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from services.common.pool.ids import PoolId
from services.kvpool.core.errors import Draining
from services.kvpool.core.events import AllBlocksCleared, EventBatch
from services.kvpool.core.pool_config import PoolConfig

Snapshot = Callable[[], EventBatch]


class EventFeed:
    """Passes every batch of events to the watchers of the pool.

    Batches that a watcher has not read yet are kept, up to `max_hashes` hashes. Beyond that they
    are dropped, and the watcher gets a new snapshot when it reads on.
    """

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._watchers: dict[PoolId, set[_Watcher]] = {}
        self._closed = False

    def open(
        self,
        pool_id: PoolId,
        generation: int,
        config: PoolConfig,  # noqa: ARG002 - hashes are passed on as they come
    ) -> None:
        self.publish(pool_id, EventBatch(generation, 0, True, ()))

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        for watcher in self._watchers.get(pool_id, ()):
            watcher.push(batch)

    async def watch(self, pool_id: PoolId, snapshot: Snapshot) -> AsyncGenerator[EventBatch]:
        """A snapshot, then what follows it, without end. Raises Draining when the feed closes."""
        watcher = _Watcher(self._max_hashes)
        watchers = self._watchers.setdefault(pool_id, set())
        watchers.add(watcher)
        try:
            while not self._closed:
                batch = watcher.pop()
                yield snapshot() if batch is None else batch
                await watcher.wait()
        finally:
            watchers.discard(watcher)
        raise Draining("the pool is draining")

    def close(self) -> None:
        """Ends every watcher."""
        self._closed = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.close()


class _Watcher:
    """Batches that one reader has yet to read; none, and `lagging`, once there were too many."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._batches: deque[EventBatch] = deque()
        self._num_hashes = 0
        self._lagging = True
        self._closed = False
        self._news = asyncio.Event()

    def push(self, batch: EventBatch) -> None:
        if self._lagging:
            return
        self._batches.append(batch)
        self._num_hashes += _weight(batch)
        if self._num_hashes > self._max_hashes:
            self._batches.clear()
            self._num_hashes = 0
            self._lagging = True
        self._news.set()

    def pop(self) -> EventBatch | None:
        """The next batch, or None if the reader is to be sent a snapshot now."""
        if self._lagging:
            self._lagging = False
            return None
        batch = self._batches.popleft()
        self._num_hashes -= _weight(batch)
        return batch

    async def wait(self) -> None:
        """Returns when there is something to read, or the feed was closed."""
        while not (self._batches or self._lagging or self._closed):
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        self._closed = True
        self._news.set()


def _weight(batch: EventBatch) -> int:
    """Hashes in a batch; 1 for a batch without any."""
    return max(
        1,
        sum(len(event.hashes) for event in batch.events if not isinstance(event, AllBlocksCleared)),
    )
