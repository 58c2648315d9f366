"""The streams of WatchEvents, through which gateways without Redis track the pools' caches."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from services.common.pool.ids import PoolId
from services.kvpool.core.errors import Draining
from services.kvpool.core.events import AllBlocksCleared, EventBatch
from services.kvpool.core.pool_config import PoolConfig

MAX_UNREAD_HASHES = 65_536
"""Limit on the unread hashes of a watcher."""

Snapshot = Callable[[], EventBatch]


class EventFeed:
    """Sends every batch of events to the watchers of its pool (the clients of WatchEvents). Unread
    batches are stored for each watcher, up to `max_hashes` hashes. If there are more, the batches
    are dropped, and a new snapshot is sent to the watcher at its next read.
    """

    def __init__(self, max_hashes: int = MAX_UNREAD_HASHES) -> None:
        self._max_hashes = max_hashes
        self._watchers: dict[PoolId, dict[_Watcher, None]] = {}
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
        """Yields a snapshot, then all later batches, without end. Raises Draining after `close`."""
        watcher = _Watcher(self._max_hashes)
        watchers = self._watchers.setdefault(pool_id, {})
        watchers[watcher] = None
        try:
            while not self._closed:
                batch = watcher.pop()
                yield snapshot() if batch is None else batch
                await watcher.wait()
        finally:
            watchers.pop(watcher, None)
        raise Draining("the kvpool is shutting down")

    def close(self) -> None:
        self._closed = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.close()


class _Watcher:
    """The unread batches of a watcher. If there are too many, drops all and sets `_lagging`."""

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
        """Returns the next batch, or None if a snapshot must be sent to the watcher instead."""
        if self._lagging:
            self._lagging = False
            return None
        batch = self._batches.popleft()
        self._num_hashes -= _weight(batch)
        return batch

    async def wait(self) -> None:
        """Waits until there is something to read or the feed is closed."""
        while not (self._batches or self._lagging or self._closed):
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        self._closed = True
        self._news.set()


def _weight(batch: EventBatch) -> int:
    return max(
        1,
        sum(len(event.hashes) for event in batch.events if not isinstance(event, AllBlocksCleared)),
    )
