"""Measures the time until a gateway's index shows a pool's cache event, sent through Redis."""

import asyncio
import random
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.common.figures import percentile
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import block_keys
from services.common.redis.connection import RedisConnection
from services.gateway.adapters.directory.redis_reader import RedisReader
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.events import BlocksStored, EventBatch
from services.kvpool.core.pool_config import PoolConfig

_FINGERPRINT = b"visible" + bytes(25)
_POOL = PoolId("pool")
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class VisibilityFigures:
    """Milliseconds from a pool's event until the index shows it."""

    median_millis: float
    p99_millis: float


async def measure_visibility(url: str, num_events: int) -> VisibilityFigures:
    """Publishes events. Each is published when the previous one is visible in the index."""
    writer = RedisDirectory(RedisConnection(url))
    index = PrefixIndex()
    reader = RedisReader(index, RedisConnection(url), RedisConnection(url, blocking=True))
    running = asyncio.create_task(reader.run(lambda: _FINGERPRINT))
    groups = (KVCacheGroup(AttentionType.FULL, 16),)
    config = PoolConfig(1_000_000, groups, fingerprint=_FINGERPRINT, node="pool")
    writer.open(_POOL, 1, config)
    rng = random.Random(1)
    times = []
    for number in range(1, num_events + 1):
        await asyncio.sleep(rng.uniform(0.001, 0.02))
        block_hash = BlockHash(rng.randbytes(32))
        keys = block_keys([block_hash])
        began = time.perf_counter()
        batch = EventBatch(1, number, False, (BlocksStored(0, (block_hash,)),))
        writer.publish(_POOL, batch)
        while not index.match(keys):
            if time.perf_counter() > began + _SECONDS:
                raise TimeoutError("an event did not become visible")
            await asyncio.sleep(0.0002)
        times.append(time.perf_counter() - began)
    await writer.close()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    # The first event is left out, because it waits until the reader has loaded the node's blocks.
    return VisibilityFigures(1000 * statistics.median(times[1:]), 1000 * percentile(times[1:], 99))
