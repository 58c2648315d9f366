"""The gateway's prefix index follows the WatchEvents streams of real pools."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from stepwell.kvpool.v1 import kvpool_pb2_grpc

from services.common.pool.kv_directory import block_keys
from services.common.rpc.channel import open_channel
from services.common.telemetry.tracing import configure_tracing
from services.gateway.adapters.directory.pool_watchers import PoolAddress, PoolWatchers
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.__main__ import PoolService
from services.kvpool.settings import KVPoolSettings
from tests.kvpool import wire
from tests.kvpool.wire import Speaker
from tests.kvpool.worked_examples import hashes
from tests.waiting import until

POOLS: list[PoolAddress] = []


@pytest.fixture
async def index() -> AsyncIterator[PrefixIndex]:
    POOLS.clear()
    index = PrefixIndex()
    task = asyncio.create_task(PoolWatchers(index).run(lambda: POOLS))
    yield index
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def started(address: str = "127.0.0.1:0") -> tuple[PoolService, str]:
    settings = KVPoolSettings(address=address, drain_seconds=0.1)
    service = PoolService(settings, configure_tracing("kvpool", "", 0.0))
    return service, await service.start()


async def test_a_pool_is_followed_from_its_opening_to_its_end(index):
    service, address = await started()
    POOLS.append(PoolAddress("node", address, "replica"))
    await until(lambda: index.state is DirectoryState.EXACT)
    assert index.node_state("node") is DirectoryState.FALLBACK
    async with open_channel(address) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        opened = await stub.OpenPool(wire.open_request())
        speaker = Speaker(stub, opened.generation)
        await speaker.transact(wire.admit(wire.admission(1, 12, path="abc")))
        await until(lambda: index.match(block_keys(hashes("abcd"))) == {"node": 3})
        await speaker.transact(wire.release(1), wire.reset())
        await until(lambda: index.match(block_keys(hashes("abcd"))) == {})
        await speaker.transact(wire.admit(wire.admission(2, 8, path="xy")))
        await until(lambda: index.match(block_keys(hashes("xyz"))) == {"node": 2})
        assert index.node_state("node") is DirectoryState.EXACT
        await stub.OpenPool(wire.open_request())
        await until(lambda: index.match(block_keys(hashes("xyz"))) == {})
    await service.drain()
    await until(lambda: index.node_state("node") is DirectoryState.FALLBACK)

    service, _ = await started(address)
    async with open_channel(address) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        opened = await stub.OpenPool(wire.open_request())
        speaker = Speaker(stub, opened.generation)
        await speaker.transact(wire.admit(wire.admission(1, 4, path="q")))
        await until(lambda: index.match(block_keys(hashes("q"))) == {"node": 1})
    await service.drain()


async def test_a_pool_that_cannot_be_reached_is_logged_once(tmp_path, caplog):
    """For example, because its address is a Unix socket of another machine."""
    caplog.set_level(logging.INFO)
    watchers = PoolWatchers(PrefixIndex())
    address = PoolAddress("node", f"unix:{tmp_path}/pool", "replica")
    task = asyncio.create_task(watchers.run(lambda: [address]))
    await until(lambda: watchers.counts.failures > 2)
    assert caplog.text.count("the cached prefixes of pool node cannot be read") == 1
    service, _ = await started(address.address)
    async with open_channel(address.address) as channel:
        await kvpool_pb2_grpc.KVPoolStub(channel).OpenPool(wire.open_request())
    await until(lambda: watchers.counts.loads > 0)
    await service.drain()
    await until(lambda: caplog.text.count("the cached prefixes of pool node cannot be read") == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_pool_whose_replica_is_gone_is_followed_no_more(index):
    service, address = await started()
    async with open_channel(address) as channel:
        await kvpool_pb2_grpc.KVPoolStub(channel).OpenPool(wire.open_request())
    POOLS.append(PoolAddress("node", address, "replica"))
    await until(lambda: index.node_state("node") is DirectoryState.EXACT)
    POOLS.clear()
    await until(lambda: index.node_state("node") is DirectoryState.FALLBACK)
    assert index.state is DirectoryState.UNUSED
    await service.drain()
