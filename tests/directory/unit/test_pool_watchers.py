"""The prefix index that follows WatchEvents passes the port Directory's conformance tests."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from benchmarks.peers.faults import faults_of
from benchmarks.peers.fields import changed
from benchmarks.peers.methods import Direction, Lane
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.gateway.adapters.directory.metrics import ReaderCounts
from services.gateway.adapters.directory.pool_watchers import PoolReader
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.adapters.converters import event_batch_to_proto
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from services.kvpool.core.pool_config import PoolConfig
from tests.directory.followed import FollowedDirectory
from tests.kvpool.directory_conformance import DirectoryConformance


class WatchedPools(EventFeed):
    """A source of events with a PoolReader for each pool. Like a real pool, it first sends a
    snapshot of the cached blocks to a new reader.
    """

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(max_hashes=64)
        self._index = index
        self._epochs = itertools.count(1)
        self._configs: dict[PoolId, PoolConfig] = {}
        self._generations: dict[PoolId, int] = {}
        self._history: dict[PoolId, EventBatch] = {}
        self._watching: dict[PoolId, asyncio.Task[None]] = {}

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        if self._generations.get(pool_id, 0) > generation:
            return
        self._configs[pool_id], self._generations[pool_id] = config, generation
        self._history[pool_id] = EventBatch(generation, 0, True, ())
        super().open(pool_id, generation, config)
        if pool_id not in self._watching:
            self._watching[pool_id] = asyncio.create_task(self._follow(pool_id))

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        if batch.generation == self._generations[pool_id]:
            before = () if batch.snapshot else self._history[pool_id].events
            self._history[pool_id] = replace(batch, snapshot=True, events=before + batch.events)
            super().publish(pool_id, batch)

    def drop(self, pool_id: PoolId, generation: int) -> None:
        if self._generations.get(pool_id) == generation:
            self._watching.pop(pool_id).cancel()

    async def end(self) -> None:
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    async def _follow(self, pool_id: PoolId) -> None:
        reader = PoolReader(pool_id, self._index, self._epochs, ReaderCounts())
        try:
            async with aclosing(self.watch(pool_id, lambda: self._snapshot(pool_id))) as batches:
                async for batch in batches:
                    groups = self._configs[pool_id].groups
                    await reader.apply(event_batch_to_proto(batch, groups))
        finally:
            self._index.remove(pool_id)

    def _snapshot(self, pool_id: PoolId) -> EventBatch:
        cached: dict[int, dict[BlockHash, None]] = {}
        for event in self._history[pool_id].events:
            match event:
                case BlocksStored(group, hashes):
                    cached.setdefault(group, {}).update(dict.fromkeys(hashes))
                case BlocksRemoved(group, hashes):
                    for block_hash in hashes:
                        del cached[group][block_hash]
                case AllBlocksCleared():
                    cached.clear()
        stored = tuple(BlocksStored(group, tuple(hashes)) for group, hashes in cached.items())
        return replace(self._history[pool_id], events=stored)


class TestWatchedPools(DirectoryConformance):
    @pytest.fixture
    async def directory(self) -> AsyncIterator[FollowedDirectory]:
        index = PrefixIndex()
        index.contact = DirectoryState.EXACT
        pools = WatchedPools(index)
        yield FollowedDirectory(pools, index)
        await pools.end()


EVENTS = Lane("/stepwell.kvpool.v1.KVPool/WatchEvents", Direction.RESPONSE)


def watched_messages() -> list[kvpool_pb2.WatchEventsResponse]:
    """A snapshot of two KV-cache groups, and a batch with an event of each kind."""
    groups = [
        common_pb2.KVCacheGroup(attention_type=kind, block_size=4, window=8 * (kind - 1))
        for kind in (1, 2)
    ]
    snapshot = kvpool_pb2.WatchEventsResponse(snapshot=True, groups=groups, sequence=3)
    snapshot.events.add().stored.hashes = b"h" * 64
    batch = kvpool_pb2.WatchEventsResponse(sequence=4)
    batch.events.add().stored.hashes = b"i" * 32
    batch.events.add().removed.hashes = b"h" * 32
    batch.events.add().cleared.SetInParent()
    return [snapshot, batch]


async def test_no_changed_field_of_an_event_ends_its_reader() -> None:
    """A wrong key only costs cache hits, but an exception in a reader would end the gateway."""
    for position, message in enumerate(watched_messages()):
        for fault in faults_of(EVENTS):
            data = changed(message, fault.path, fault.change) if fault.path else None
            if data is None:
                continue
            messages = watched_messages()
            try:
                messages[position] = kvpool_pb2.WatchEventsResponse.FromString(data)
            except DecodeError:  # gRPC would end the call with an error
                continue
            index = PrefixIndex()
            reader = PoolReader("node", index, itertools.count(1), ReaderCounts())
            for one in messages:
                await reader.apply(one)
            index.match([1, 2])
