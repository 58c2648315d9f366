"""A directory of cached KV blocks: pools write to it, and a gateway's prefix index reads it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.common.pool.kv_directory import block_keys
from services.common.redis.connection import RedisConnection
from services.gateway.adapters.directory.follower import sweep
from services.gateway.adapters.directory.redis_reader import ReaderTimes, RedisReader
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.node_writer import WriterTimes
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.events import EventBatch
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.ports import PoolMatch

WRITER = WriterTimes(
    flush_seconds=0.002,
    heartbeat_seconds=0.05,
    lease_seconds=0.6,
    snapshot_seconds=2.0,
    first_backoff_seconds=0.02,
    max_backoff_seconds=0.1,
)
READER = ReaderTimes(
    refresh_seconds=0.05,
    urgent_seconds=0.01,
    lease_seconds=0.6,
    first_backoff_seconds=0.02,
    max_backoff_seconds=0.1,
)


class Gateway:
    """The gateway's reader of a directory in Redis, with the prefix index that it updates."""

    def __init__(self, url: str, fingerprint: bytes | None, times: ReaderTimes = READER) -> None:
        self.index = PrefixIndex()
        self.fingerprint = fingerprint
        tail = RedisConnection(url, blocking=True)
        self.reader = RedisReader(self.index, RedisConnection(url), tail, times)
        self._tasks = [
            asyncio.create_task(self.reader.run(lambda: self.fingerprint)),
            asyncio.create_task(sweep(self.index)),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task


class FollowedDirectory:
    """A Directory. A PrefixIndex follows its published events, and matches prompts."""

    def __init__(self, writer: RedisDirectory | EventFeed, index: PrefixIndex) -> None:
        self._writer = writer
        self._index = index
        self._generations: dict[str, int] = {}

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        known = self._generations.get(pool_id, 0)
        self._generations[pool_id] = max(known, generation)
        self._writer.open(pool_id, generation, config)

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        self._writer.publish(pool_id, batch)

    def drop(self, pool_id: PoolId, generation: int) -> None:
        self._writer.drop(pool_id, generation)

    async def match(self, hashes: Sequence[BlockHash]) -> list[PoolMatch]:
        depths = self._index.match(block_keys(hashes))
        return [
            PoolMatch(PoolId(node), self._generations[node], depth)
            for node, depth in sorted(depths.items())
        ]


@asynccontextmanager
async def redis_directory(
    url: str, fingerprint: bytes
) -> AsyncIterator[tuple[FollowedDirectory, Gateway]]:
    """A directory in Redis, and the gateway whose index follows it."""
    writer = RedisDirectory(RedisConnection(url), WRITER)
    gateway = Gateway(url, fingerprint)
    try:
        yield FollowedDirectory(writer, gateway.index), gateway
    finally:
        await writer.close()
        await gateway.close()
