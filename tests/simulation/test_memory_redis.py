"""The in-memory Redis passes the conformance tests of the ports Directory and Journal over TCP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.redis.connection import RedisConnection
from services.common.redis.fleet_registry import FleetRegistry, RegisteredReplica
from services.gateway.options.idempotency.redis_journal import RedisJournal
from services.simulation.runtime.memory_redis import MemoryRedis
from tests.directory.followed import FollowedDirectory, redis_directory
from tests.gateway.options.idempotency.journal_conformance import (
    LEASE_SECONDS,
    JournalConformance,
    Journals,
)
from tests.kvpool.directory_conformance import FINGERPRINT, DirectoryConformance
from tests.waiting import until


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[MemoryRedis, str]]:
    memory, connections = MemoryRedis(), set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        await memory.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield memory, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


class TestDirectory(DirectoryConformance):
    @pytest.fixture
    async def directory(self) -> AsyncIterator[FollowedDirectory]:
        async with serving() as (_, url), redis_directory(url, FINGERPRINT) as (directory, _):
            yield directory


class TestJournal(JournalConformance):
    @pytest.fixture
    async def journals(self) -> AsyncIterator[Journals]:
        async with serving() as (_, url):
            first, second = (
                RedisJournal(
                    *(RedisConnection(url), name),
                    lease_seconds=LEASE_SECONDS,
                    retention_seconds=60.0,
                )
                for name in "ab"
            )
            yield first, second
            await first.close()
            await second.close()


async def test_a_replica_is_registered_until_its_lease_ends_or_it_leaves() -> None:
    one, other = RegisteredReplica("host:1", "node-1"), RegisteredReplica("host:2", "node-2")
    async with serving() as (memory, url):
        redis = RedisConnection(url)
        registry = FleetRegistry(redis, "demo", lease_seconds=0.3)
        await registry.renew(one)
        await registry.renew(other)
        assert await registry.replicas() == [one, other]
        await registry.remove(one)
        assert await registry.replicas() == [other]
        await until(lambda: not memory.keys, 60.0)
        assert await registry.replicas() == []
        await redis.close()


async def test_a_read_that_has_waited_in_vain_leaves_nothing_in_memory() -> None:
    async with serving() as (memory, url):
        redis = RedisConnection(url)
        for _ in range(2):
            found = await redis.call(lambda client: client.xread({"log": "0-0"}, block=1))
            assert not found
        assert not memory._added
        await redis.close()
