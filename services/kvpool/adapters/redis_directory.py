"""Writes the pools' cached keys to the directory in Redis, for gateways to read. Pools never wait
for Redis, because each pool has a task that writes the recorded events.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.common.pool.ids import PoolId
from services.common.redis.connection import RedisConnection
from services.kvpool.adapters.node_writer import NodeWriter, WriterCounts, WriterTimes
from services.kvpool.core.events import EventBatch
from services.kvpool.core.pool_config import PoolConfig


class RedisDirectory:
    """An EventSink with a writer for each pool."""

    def __init__(self, redis: RedisConnection, times: WriterTimes | None = None) -> None:
        self.counts = WriterCounts()
        self._redis = redis
        self._times = times or WriterTimes()
        self._writers: dict[PoolId, NodeWriter] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def require_usable(self) -> None:
        """Raises SettingError if the URL or the password is wrong."""
        await self._redis.require_usable()

    @property
    def num_unwritten(self) -> int:
        return sum(len(writer.changes) for writer in self._writers.values())

    @property
    def num_dropped(self) -> int:
        """The number of changes dropped because the directory's log could not be written."""
        return sum(writer.changes.num_dropped for writer in self._writers.values())

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        """Starts a writer for a pool that was opened again. Ignores an older generation number."""
        before = self._writers.get(pool_id)
        if before is not None:
            if before.generation >= generation:
                return
            is_replaced = before.node == config.node
            self._spawn(before.stop() if is_replaced else before.leave(has_successor=True))
        writer = NodeWriter(generation, config, self._redis, self._times, self.counts)
        self._writers[pool_id] = writer
        writer.start()

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        """Records a batch if it belongs to the newest generation."""
        writer = self._writers.get(pool_id)
        if writer is not None and writer.generation == batch.generation:
            writer.note(batch)

    def drop(self, pool_id: PoolId, generation: int) -> None:
        writer = self._writers.get(pool_id)
        if writer is not None and writer.generation == generation:
            del self._writers[pool_id]
            self._spawn(writer.leave())

    async def close(self) -> None:
        """Removes every pool from the directory, if Redis answers in time."""
        for writer in self._writers.values():
            self._spawn(writer.leave())
        self._writers.clear()
        await asyncio.gather(*self._ending)
        await self._redis.close()

    def _spawn(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
