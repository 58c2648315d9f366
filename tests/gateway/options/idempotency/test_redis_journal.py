"""The Journal in Redis, on one server and on a cluster of three, passes its conformance tests."""

import time
from collections.abc import AsyncIterator, Iterator

import pytest

from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.gateway.options.idempotency.redis_journal import CALL_SECONDS, RedisJournal
from tests.gateway.options.idempotency.journal_conformance import (
    LEASE_SECONDS,
    JournalConformance,
    Journals,
    append,
    entry,
)
from tests.redis_servers import RedisServer, needs_redis, redis_cluster, until
from tests.slowness import busy_slowness

RETENTION_SECONDS = 1.5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes[1]


async def connected(url: str) -> AsyncIterator[Journals]:
    connections = RedisConnection(url), RedisConnection(url)
    await connections[0].call(lambda client: client.flushall(), 5.0)
    first, second = (
        RedisJournal(redis, name, lease_seconds=LEASE_SECONDS, retention_seconds=RETENTION_SECONDS)
        for redis, name in zip(connections, ("a", "b"), strict=True)
    )
    await second.ping()
    yield first, second
    await first.close()
    await second.close()


@needs_redis
class TestRedisJournal(JournalConformance):
    @pytest.fixture
    async def journals(self, shared_redis: RedisServer) -> AsyncIterator[Journals]:
        async for pair in connected(shared_redis.url):
            yield pair

    async def test_logs_and_leases_expire(self, journals: Journals, shared_redis: RedisServer):
        ours, _ = journals
        await ours.open("s")
        await append(ours, entry(0))
        assert shared_redis.ask("DBSIZE") == b":2\r\n"
        await until(lambda: shared_redis.ask("DBSIZE") == b":0\r\n", 60)

    async def test_a_stopped_server_costs_a_fraction_of_a_second(
        self, journals: Journals, shared_redis: RedisServer
    ):
        ours, _ = journals
        shared_redis.stop()
        try:
            began = time.monotonic()
            with pytest.raises(RedisUnavailable):
                await ours.open("s")
            assert time.monotonic() - began < 4 * CALL_SECONDS * busy_slowness()
        finally:
            shared_redis.go_on()

    async def test_a_server_without_memory_is_unavailable(
        self, journals: Journals, shared_redis: RedisServer
    ):
        ours, _ = journals
        shared_redis.ask("CONFIG", "SET", "maxmemory", "1")
        try:
            with pytest.raises(RedisUnavailable, match="memory"):
                await append(ours, entry(0))
        finally:
            shared_redis.ask("CONFIG", "SET", "maxmemory", "0")


@needs_redis
class TestRedisClusterJournal(JournalConformance):
    @pytest.fixture
    async def journals(self, cluster: RedisServer) -> AsyncIterator[Journals]:
        async for pair in connected(cluster.url):
            yield pair
