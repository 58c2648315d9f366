"""The registry in Redis of the replicas that serve a model: its records, leases and key names."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.redis_servers import RedisServer, needs_redis, redis_cluster, redis_server

if needs_redis.args[0]:
    pytest.skip(needs_redis.kwargs["reason"], allow_module_level=True)

from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.common.redis.fleet_registry import (
    FleetRegistry,
    RegisteredReplica,
    record_from_bytes,
    record_to_bytes,
)

A = RegisteredReplica("10.0.0.1:9001", "replica-0-a")
B = RegisteredReplica("10.0.0.2:9001", "replica-0-b")
KEY = "fleet:{demo}:replicas"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisConnection]:
    server.ask("FLUSHALL")
    redis = RedisConnection(server.url)
    yield redis
    await redis.close()


async def test_who_registers_is_read_until_removed(redis: RedisConnection) -> None:
    registry = FleetRegistry(redis, "demo")
    assert await registry.replicas() == []
    await registry.renew(A)
    await registry.renew(B)
    await registry.renew(A)
    assert set(await registry.replicas()) == {A, B}
    await registry.remove(A)
    await registry.remove(A)
    assert await registry.replicas() == [B]


async def test_a_lease_ends_unless_it_is_renewed(redis: RedisConnection) -> None:
    registry, short = FleetRegistry(redis, "demo"), FleetRegistry(redis, "demo", 0.3)
    await short.renew(A)
    await registry.renew(B)
    assert set(await registry.replicas()) == {A, B}
    async with asyncio.timeout(60):
        while await registry.replicas() != [B]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await redis.call(lambda client: client.zcard(KEY)) == 2
    await registry.renew(B)
    assert await redis.call(lambda client: client.zcard(KEY)) == 1, "what ended is removed"


async def test_a_registry_that_is_not_renewed_leaves_nothing(redis: RedisConnection) -> None:
    await FleetRegistry(redis, "demo", 0.2).renew(A)
    async with asyncio.timeout(60):
        while await redis.call(lambda client: client.dbsize()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_each_model_has_a_registry_of_its_own(redis: RedisConnection) -> None:
    await FleetRegistry(redis, "demo").renew(A)
    other = FleetRegistry(redis, "org/a model} {*")
    await other.renew(B)
    assert await other.replicas() == [B]
    assert await FleetRegistry(redis, "demo").replicas() == [A]
    keys = await redis.call(lambda client: client.keys("*"))
    assert set(keys) == {KEY.encode(), b"fleet:{org/a%20model%7D%20%7B%2A}:replicas"}


async def test_a_process_that_replaces_another_one_keeps_its_record(redis: RedisConnection) -> None:
    """The old process of a replica may remove its record after the new process has written one."""
    registry = FleetRegistry(redis, "demo")
    new = RegisteredReplica(A.address, "replica-0-new")
    await registry.renew(A)
    await registry.renew(new)
    await registry.remove(A)
    assert await registry.replicas() == [new]


async def test_a_damaged_record_is_passed_over_and_logged_once(
    redis: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    registry = FleetRegistry(redis, "demo")
    await registry.renew(A)
    far = 10**14
    for damaged in (b"", b"\xff", b"[]", b'{"address":"x:1"}', b'{"address":":1","node":""}'):
        await redis.call(lambda client, record=damaged: client.zadd(KEY, {record: far}))
    for _ in range(2):
        assert await registry.replicas() == [A]
    assert (
        caplog.text.count("a damaged record of the schedulers' registry in Redis is ignored") == 5
    )


def test_a_record_of_a_later_version_is_read() -> None:
    assert record_from_bytes(record_to_bytes(A)) == A
    assert record_from_bytes(record_to_bytes(A)[:-1] + b',"zone":"b"}') == A


async def test_a_value_of_another_type_is_an_error(redis: RedisConnection) -> None:
    await redis.call(lambda client: client.set(KEY, "text"))
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await FleetRegistry(redis, "demo").renew(A)


async def test_it_works_in_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        redis = RedisConnection(nodes[0].url)
        for name in ("demo", "another", "a third one"):
            registry = FleetRegistry(redis, name)
            await registry.renew(A)
            await registry.renew(B)
            await registry.remove(B)
            assert await registry.replicas() == [A]
        await redis.close()
