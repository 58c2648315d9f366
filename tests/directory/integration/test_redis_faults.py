"""Redis is killed, stopped, emptied, filled up, trimmed and damaged while pools write their cached
blocks to it and gateways read them. No pool waits, the gateways' index shows its state, and within
five seconds it equals the pools again.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.common.pool.ids import PoolId
from services.common.pool.kv_directory import KeyBatch
from services.common.redis.connection import RedisConnection
from services.common.redis.directory_layout import DirectoryKeys, batch_to_bytes
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.pool_config import PoolConfig
from tests.directory.busy_pools import FULL, BusyPools, LoopWatch, keys_of, right_again
from tests.directory.followed import WRITER, Gateway
from tests.kvpool.directory_conformance import FINGERPRINT
from tests.redis_servers import RedisServer, needs_redis, until
from tests.slowness import slowness

pytestmark = needs_redis

KEYS = DirectoryKeys.of(FINGERPRINT)
MOST_PUBLISH_SECONDS, MOST_PAUSE_SECONDS = 0.05 * slowness(), 0.25 * slowness()
"""Limits for a call of `publish` and for a pause of the event loop. A `publish` that waited for
Redis would take half a second.
"""


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(server.url, FINGERPRINT)
    yield gateway
    await gateway.close()


@pytest.fixture
async def pools(server: RedisServer) -> AsyncIterator[BusyPools]:
    pools = BusyPools(server.url)
    yield pools
    await pools.close()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisConnection]:
    redis = RedisConnection(server.url)
    yield redis
    await redis.close()


async def test_a_server_that_was_killed_comes_back_empty(server, pools, gateway):
    await right_again(pools, gateway)
    watch = LoopWatch()
    server.kill()
    await until(lambda: gateway.index.state is DirectoryState.FALLBACK)
    assert gateway.index.match([1, 2, 3]) == {}
    await asyncio.to_thread(server.start)
    await right_again(pools, gateway)
    await watch.close()
    assert gateway.reader.counts.failures > 0
    assert pools.slowest_publish_seconds < MOST_PUBLISH_SECONDS
    assert watch.longest_seconds < MOST_PAUSE_SECONDS


async def test_a_stopped_server_holds_up_nothing(server, pools, gateway):
    await right_again(pools, gateway)
    watch = LoopWatch()
    server.stop()
    await until(lambda: gateway.index.state is DirectoryState.DEGRADED)
    await until(lambda: gateway.index.state is DirectoryState.FALLBACK)
    await until(lambda: pools.writer.counts.failures > 3)
    server.go_on()
    await right_again(pools, gateway)
    await watch.close()
    assert pools.slowest_publish_seconds < MOST_PUBLISH_SECONDS
    assert watch.longest_seconds < MOST_PAUSE_SECONDS


async def test_an_emptied_server_is_filled_again(pools, gateway, redis):
    await right_again(pools, gateway)
    num_epochs = pools.writer.counts.num_epochs
    await redis.call(lambda client: client.flushall())
    await until(lambda: pools.writer.counts.num_epochs >= num_epochs + 3)
    await right_again(pools, gateway)


async def test_a_server_without_memory_takes_nothing_until_there_is_some(pools, gateway, redis):
    await right_again(pools, gateway)
    await redis.call(lambda client: client.config_set("maxmemory", "1"))
    await until(lambda: not list(gateway.index.views))
    await redis.call(lambda client: client.config_set("maxmemory", "0"))
    await right_again(pools, gateway)


async def test_why_a_pool_was_never_written_is_logged_once(server, redis, gateway, caplog):
    """For example, because the user of the URL may not write the log."""
    rights = ["on", ">secret", "~kvd:*", "+@all", "-xadd"]
    await redis.call(lambda client: client.execute_command("ACL", "SETUSER", "pool", *rights))
    url = server.url.replace("redis://", "redis://pool:secret@")
    directory = RedisDirectory(RedisConnection(url), WRITER)
    directory.open(PoolId("a"), 1, PoolConfig(10, (FULL,), fingerprint=FINGERPRINT, node="a"))
    await until(lambda: directory.counts.failures > 3)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be written" in warning.message
    assert "'xadd'" in warning.message
    await redis.call(lambda client: client.execute_command("ACL", "SETUSER", "pool", "+xadd"))
    await until(lambda: gateway.index.view("a") is not None)
    await directory.close()


async def test_damaged_entries_are_counted_and_passed_over(pools, gateway, redis):
    await right_again(pools, gateway)
    whole = batch_to_bytes(KeyBatch(1, 1, [5]))
    for value in (b"", b"x", whole[:-3], whole[:-1] + b"\xff"):
        await redis.call(lambda client, value=value: client.xadd(KEYS.log, {b"b": value}))
    await redis.call(lambda client: client.xadd(KEYS.log, {b"another": b"field"}))
    await until(lambda: gateway.reader.counts.damaged == 5)
    await right_again(pools, gateway)
    assert gateway.reader.counts.gaps == 0


async def test_a_damaged_record_is_passed_over(pools, gateway, redis):
    await right_again(pools, gateway)
    await redis.call(lambda client: client.hset(KEYS.nodes, "x", b"{"))
    await until(lambda: gateway.reader.counts.damaged > 0)
    await right_again(pools, gateway)


async def test_a_damaged_snapshot_is_written_anew(pools, gateway, redis):
    await right_again(pools, gateway)
    epoch = gateway.index.view("a").epoch
    await redis.call(lambda client: client.set(KEYS.snapshot("a", epoch), b"not a snapshot"))
    gateway.index.degrade("a")
    await until(lambda: gateway.reader.counts.damaged > 0)
    await right_again(pools, gateway)
    assert gateway.index.view("a").epoch > epoch


async def test_a_trimmed_log_costs_a_new_reader_a_snapshot(server, pools, gateway, redis):
    await right_again(pools, gateway)
    await asyncio.sleep(0.1)
    await redis.call(lambda client: client.xtrim(KEYS.log, maxlen=0, approximate=False))
    late = Gateway(server.url, FINGERPRINT)
    await right_again(pools, late)
    await right_again(pools, gateway)
    await late.close()


async def test_a_view_that_drifted_is_loaded_again_alone(pools, gateway, redis):
    """The log contains a forged entry of a node, with the number of the node's next real entry."""
    await right_again(pools, gateway)
    await pools.pause()
    view = gateway.index.view("b")
    loads = gateway.reader.counts.loads
    forged = batch_to_bytes(KeyBatch(view.epoch, view.sequence + 1, [12345]))
    await redis.call(lambda client: client.xadd(KEYS.log, {b"b": forged}))
    await until(lambda: 12345 in keys_of(gateway.index, "b"))
    pools.change("b")
    await until(lambda: gateway.reader.counts.drifts + gateway.reader.counts.gaps > 0)
    pools.resume()
    await right_again(pools, gateway)
    assert gateway.reader.counts.loads <= loads + 3
    assert gateway.index.view("b").epoch != view.epoch or gateway.reader.counts.loads > loads


async def test_a_pool_that_is_killed_is_gone_with_its_lease(server, gateway):
    config = PoolConfig(10, (FULL,), fingerprint=FINGERPRINT, node="short")
    writer = RedisDirectory(RedisConnection(server.url), WRITER)
    writer.open(PoolId("short"), 1, config)
    await until(lambda: gateway.index.view("short") is not None)
    await writer._writers[PoolId("short")].stop()
    await until(lambda: gateway.index.view("short") is None)
    await writer.close()


async def test_a_pool_that_only_paused_is_loaded_from_its_snapshot(server, redis, gateway):
    directory, key = RedisDirectory(RedisConnection(server.url), WRITER), KEYS.lease("paused")
    await _open(directory, "paused")
    await until(lambda: gateway.index.view("paused") is not None)
    epoch = gateway.index.view("paused").epoch
    await directory._writers[PoolId("paused")].stop()
    lease = await redis.call(lambda client: client.get(key))
    await redis.call(lambda client: client.delete(key))
    await until(lambda: gateway.index.view("paused") is None)
    await redis.call(lambda client: client.set(key, lease))
    await until(lambda: gateway.index.view("paused") is not None)
    assert (gateway.index.view("paused").epoch, gateway.index.view("paused").is_exact) == (
        epoch,
        True,
    )
    await directory.close()


@pytest.mark.parametrize("event", ["another joins", "another leaves"])
async def test_another_node_removes_the_record_of_a_killed_pool(server, redis, event):
    directory, killed = RedisDirectory(RedisConnection(server.url), WRITER), PoolId("killed")
    await _open(directory, "killed", "other")
    await directory._writers.pop(killed).stop()
    await redis.call(lambda client: client.delete(KEYS.lease("killed")))
    if event == "another joins":
        await _open(directory, "new")
        assert await _nodes(redis) == {b"other", b"new"}
    await directory.close()
    assert not await _nodes(redis)


async def test_the_last_node_that_leaves_deletes_the_log(server, redis, gateway):
    first, last = (RedisDirectory(RedisConnection(server.url), WRITER) for _ in range(2))
    await _open(first, "first")
    await _open(last, "last")
    await first.close()
    assert await redis.call(lambda client: client.xlen(KEYS.log))
    await until(lambda: [view.node for view in gateway.index.views] == ["last"])
    await last.close()
    assert await redis.call(lambda client: client.keys("*")) == []
    again = RedisDirectory(RedisConnection(server.url), WRITER)
    await _open(again, "again")
    await until(lambda: [view.node for view in gateway.index.views] == ["again"])
    await again.close()


async def _open(directory: RedisDirectory, *nodes: str) -> None:
    for node in nodes:
        config = PoolConfig(10, (FULL,), fingerprint=FINGERPRINT, node=node)
        directory.open(PoolId(node), 1, config)
    await until(lambda: directory.counts.nodes_connected >= set(nodes))


async def _nodes(redis: RedisConnection) -> set[bytes]:
    return set(await redis.call(lambda client: client.hgetall(KEYS.nodes)))


async def test_a_process_that_was_replaced_stops_writing(server, gateway, caplog):
    config = PoolConfig(10, (FULL,), fingerprint=FINGERPRINT, node="one")
    before, after = (RedisDirectory(RedisConnection(server.url), WRITER) for _ in range(2))
    before.open(PoolId("one"), 1, config)
    await until(lambda: gateway.index.view("one") is not None)
    epoch = gateway.index.view("one").epoch
    after.open(PoolId("one"), 2, config)
    await until(lambda: "another process writes" in caplog.text)
    await until(lambda: (view := gateway.index.view("one")) is not None and view.epoch > epoch)
    await before.close()
    assert gateway.index.view("one") is not None
    await after.close()


async def test_a_pool_that_another_scheduler_opens_has_another_node(server, gateway):
    writer = RedisDirectory(RedisConnection(server.url), WRITER)
    for generation, node in ((1, "before"), (2, "after")):
        config = PoolConfig(10, (FULL,), fingerprint=FINGERPRINT, node=node)
        writer.open(PoolId("pool"), generation, config)
        await until(lambda node=node: [view.node for view in gateway.index.views] == [node])
    await writer.close()
    await until(lambda: not list(gateway.index.views))


async def test_more_than_is_kept_unwritten_is_dropped_for_a_snapshot(server, gateway):
    pools = BusyPools(server.url, replace(WRITER, max_unwritten_keys=200))
    await right_again(pools, gateway)
    server.stop()
    await until(lambda: pools.writer.num_dropped > 1000)
    assert pools.writer.num_unwritten <= 3 * 220
    server.go_on()
    await right_again(pools, gateway)
    await pools.close()


async def test_another_model_has_another_directory(pools, gateway):
    await right_again(pools, gateway)
    gateway.fingerprint = b"another model" + bytes(19)
    await until(lambda: not list(gateway.index.views))
    assert gateway.index.state is DirectoryState.EXACT
    gateway.fingerprint = FINGERPRINT
    await right_again(pools, gateway)


async def test_a_model_without_a_replica_uses_no_directory(server, pools):
    gateway = Gateway(server.url, None)
    await until(lambda: gateway.index.state is DirectoryState.UNUSED)
    gateway.fingerprint = FINGERPRINT
    await right_again(pools, gateway)
    await gateway.close()


async def test_two_gateways_come_to_the_view_of_the_pools(server, pools, gateway):
    other = Gateway(server.url, FINGERPRINT)
    await right_again(pools, gateway)
    await right_again(pools, other)
    await other.close()


async def test_a_log_keeps_two_periods_of_snapshots(server, redis, gateway):
    pools = BusyPools(server.url, replace(WRITER, snapshot_seconds=0.2))
    await right_again(pools, gateway)
    await asyncio.sleep(1.5)
    length = await redis.call(lambda client: client.xlen(KEYS.log))
    # Three pools write at most 100 entries a second each. The log keeps the entries of 0.4 s, and
    # Redis trims it only by whole nodes of 100 entries.
    assert 20 < length < 300 + 120
    assert gateway.reader.counts.gaps == 0
    await pools.close()


async def test_a_lost_node_of_a_cluster_holds_up_nothing(cluster):
    for node in cluster:
        node.ask("FLUSHALL")
    answer = cluster[0].ask("CLUSTER", "KEYSLOT", KEYS.log)
    slot = int(answer.strip().removeprefix(b":"))
    owner = next(node for node in cluster if _owns(node, slot))
    seed = next(node for node in cluster if node is not owner)
    pools, gateway = BusyPools(seed.url), Gateway(seed.url, FINGERPRINT)
    await right_again(pools, gateway)
    owner.kill()
    await until(lambda: gateway.index.state is DirectoryState.FALLBACK)
    await asyncio.to_thread(owner.start)
    await right_again(pools, gateway, 10.0)
    assert pools.slowest_publish_seconds < MOST_PUBLISH_SECONDS
    await pools.close()
    await gateway.close()


def _owns(node: RedisServer, slot: int) -> bool:
    for line in node.ask("CLUSTER", "NODES").decode().splitlines():
        if "myself" in line:
            first, _, last = line.split()[-1].partition("-")
            return int(first) <= slot <= int(last)
    return False
