"""Pools with changing prefix caches, and the contents that a gateway's index must have."""

import asyncio
import random
import time

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import block_keys
from services.common.redis.connection import RedisConnection
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.adapters.node_writer import WriterTimes
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from services.kvpool.core.pool_config import PoolConfig
from tests.directory.followed import WRITER, Gateway
from tests.kvpool.directory_conformance import FINGERPRINT
from tests.slowness import busy_slowness, seconds_without_processor
from tests.waiting import until

FULL = KVCacheGroup(AttentionType.FULL, 16)
NAMES = ("a", "b", "c")


class BusyPools:
    """Publishes random events of three pools in one RedisDirectory, a hundred times a second."""

    def __init__(self, url: str, times: WriterTimes = WRITER) -> None:
        self.writer = RedisDirectory(RedisConnection(url), times)
        self.held: dict[str, dict[BlockHash, None]] = {name: {} for name in NAMES}
        self.slowest_publish_seconds = 0.0
        self._rng = random.Random(5)
        self._sequences = dict.fromkeys(NAMES, 0)
        for name in NAMES:
            config = PoolConfig(1000, (FULL,), fingerprint=FINGERPRINT, node=name)
            self.writer.open(PoolId(name), 1, config)
        self._task = asyncio.create_task(self._run())

    def change(self, name: str) -> None:
        """Publishes one batch of random events of a pool."""
        held, rng = self.held[name], self._rng
        events: list[Event] = []
        if rng.random() < 0.01:
            held.clear()
            events.append(AllBlocksCleared())
        gone = tuple(list(held)[: rng.randrange(0, 8)] if len(held) > 100 else ())
        for block_hash in gone:
            del held[block_hash]
        new = tuple(BlockHash(rng.randbytes(32)) for _ in range(rng.randrange(1, 12)))
        held.update(dict.fromkeys(new))
        events += [BlocksRemoved(0, gone), BlocksStored(0, new)]
        self._sequences[name] += 1
        began = own_time()
        self.writer.publish(
            PoolId(name), EventBatch(1, self._sequences[name], False, tuple(events))
        )
        self.slowest_publish_seconds = max(self.slowest_publish_seconds, own_time() - began)

    async def pause(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def resume(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await self.pause()
        await self.writer.close()

    def equal(self, index: PrefixIndex) -> bool:
        """Whether the gateway's index has exactly the keys of the pools' cached blocks."""
        return index.state is DirectoryState.EXACT and all(
            keys_of(index, name) == set(block_keys(held)) for name, held in self.held.items()
        )

    async def _run(self) -> None:
        while True:
            for name in self.held:
                self.change(name)
            await asyncio.sleep(0.01)


def own_time() -> float:
    """A clock in seconds that stands still while this thread waits for a processor."""
    return time.perf_counter() - seconds_without_processor()


async def right_again(pools: BusyPools, gateway: Gateway, seconds: float = 5.0) -> None:
    """Waits until the gateway's index is EXACT, with a view of each pool, while the pools change.
    Then stops the changes, waits until the index equals the pools' contents, and resumes the
    changes. Each wait lasts up to `seconds`, or longer on a slow machine.
    """
    seconds *= busy_slowness()
    await until(
        lambda: (
            gateway.index.state is DirectoryState.EXACT
            and {view.node for view in gateway.index.views} == set(pools.held)
        ),
        seconds,
    )
    await pools.pause()
    await until(lambda: pools.equal(gateway.index), seconds)
    pools.resume()


class LoopWatch:
    """Measures the longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began = own_time()
            await asyncio.sleep(0.005)
            self.longest_seconds = max(self.longest_seconds, own_time() - began - 0.005)


def keys_of(index: PrefixIndex, node: str) -> set[int]:
    view = index.view(node)
    if view is None:
        return set()
    return {key for shard in index._shards for key, held in shard.items() if held & view.bit}
