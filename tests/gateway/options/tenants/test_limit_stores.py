"""The limits of tenants in memory and in Redis, each compared with a brute-force oracle."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.redis.connection import RedisConnection
from services.gateway.options.tenants.core.limits.memory_limits import MemoryLimits
from services.gateway.options.tenants.core.limits.rule import (
    UNITS,
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
)
from services.gateway.options.tenants.core.limits.tenant_limits import LimitStore
from services.gateway.options.tenants.limits.redis_limits import TAKE_SECONDS, RedisLimits
from tests.gateway.options.tenants.limits_oracle import LimitsOracle
from tests.redis_servers import RedisServer, needs_redis, redis_server, until
from tests.slowness import busy_slowness

LEASE_MILLIS = 1000
PATIENT_SECONDS = 60.0
"""A time limit for Redis calls that suffices on a busy machine."""
HOLD, RELEASE, KEEP = SlotChange.HOLD, SlotChange.RELEASE, SlotChange.KEEP


@dataclass
class World:
    store: LimitStore
    runner: asyncio.Runner
    now_millis: int = 1_000_000
    is_real_time: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def take(self, limits: LimitSet, change: Change) -> Standing:
        return self.runner.run(self.store.take(limits, change))

    def wait(self, millis: int) -> None:
        if self.is_real_time:
            time.sleep(millis / 1000)
        else:
            self.now_millis += millis

    def tenant(self) -> str:
        return f"tenant-{next(self.numbers)}"


@pytest.fixture(scope="module", params=["memory", pytest.param("redis", marks=needs_redis)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with asyncio.Runner() as runner:
        if request.param == "memory":
            store = MemoryLimits(lambda: world.now_millis, LEASE_MILLIS)
            world = World(store, runner)
            yield world
            return
        server: RedisServer = request.getfixturevalue("shared_redis")
        redis = RedisConnection(server.url)
        shared = RedisLimits(
            *(redis, "gateway-1", MemoryLimits(lambda: 0)),
            take_seconds=PATIENT_SECONDS,
            slot_lease_millis=LEASE_MILLIS,
        )
        yield World(shared, runner, is_real_time=True)
        assert not shared.is_lost
        runner.run(redis.close())


LIMITS = st.none() | st.sampled_from([1, 2, 3, 60, 1000, 60_000, 1_000_000_000])
CHANGES = st.builds(
    Change,
    slot=st.sampled_from("abcd"),
    num_requests=st.sampled_from([0, 0, 1, 1, 2, -1]),
    num_tokens=st.sampled_from([0, 0, 1, 5, 300, 70_000, -3, -1000]),
    slot_change=st.sampled_from(SlotChange),
    must_fit=st.sampled_from([True, True, False]),
)
PAUSES = st.sampled_from([0, 0, 0, 1, 7])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.tuples(LIMITS, LIMITS, st.none() | st.integers(1, 3)),
    st.lists(st.tuples(CHANGES, PAUSES), max_size=25),
)
def test_a_store_does_what_the_history_says(
    world: World, limits: tuple[int | None, int | None, int | None], steps: list[tuple[Change, int]]
) -> None:
    given_limits = LimitSet(world.tenant(), *limits)
    oracle = LimitsOracle(given_limits, LEASE_MILLIS)
    for change, pause in steps:
        world.wait(pause)
        oracle.check(change, world.take(given_limits, change))


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(LIMITS, LIMITS, st.none() | st.integers(1, 3)),
    st.lists(st.tuples(CHANGES, st.integers(0, 70_000)), max_size=25),
)
def test_long_times_pass_in_memory(
    limits: tuple[int | None, int | None, int | None], steps: list[tuple[Change, int]]
) -> None:
    now = 0
    store = MemoryLimits(lambda: now, LEASE_MILLIS)
    given_limits = LimitSet("acme", *limits)
    oracle = LimitsOracle(given_limits, LEASE_MILLIS)
    for change, pause in steps:
        now += pause
        oracle.check(change, store.apply(given_limits, change))


def test_a_minutes_worth_can_be_taken_at_once_and_then_comes_back_evenly(world: World) -> None:
    limits = LimitSet(world.tenant(), requests_per_minute=60)
    first = world.take(limits, Change("a", num_requests=60))
    assert (first.refused_by, first.requests_level) == (None, 0)
    second = world.take(limits, Change("a", num_requests=1))
    assert second.refused_by is Quota.REQUESTS
    assert 0 < second.wait_millis <= 1000
    world.wait(second.wait_millis)
    assert world.take(limits, Change("a", num_requests=1)).refused_by is None


def test_a_refusal_takes_nothing_of_any_limit(world: World) -> None:
    limits = LimitSet(world.tenant(), 5, 10, 1)
    assert world.take(limits, Change("a", 1, 0, HOLD)).refused_by is None
    assert world.take(limits, Change("b", 1, 0, HOLD)).refused_by is Quota.CONCURRENCY
    assert world.take(limits, Change("a", 0, 11, KEEP)).refused_by is None, "a full bucket"
    refused = world.take(limits, Change("a", 1, 0, KEEP))
    assert refused.refused_by is Quota.TOKENS, "not one token is left"
    assert refused.requests_level >= 4 * UNITS
    assert refused.num_slots == 1


def test_a_slot_that_is_not_renewed_is_free_after_its_lease(world: World) -> None:
    limits = LimitSet(world.tenant(), max_concurrent_requests=1)
    assert world.take(limits, Change("a", slot_change=HOLD)).refused_by is None
    world.wait(LEASE_MILLIS // 2)
    assert world.take(limits, Change("a", slot_change=HOLD)).refused_by is None, "renewed"
    assert world.take(limits, Change("b", slot_change=HOLD)).refused_by is Quota.CONCURRENCY
    world.wait(LEASE_MILLIS + 20)
    assert world.take(limits, Change("b", slot_change=HOLD)).num_slots == 1


def test_what_was_reserved_and_not_used_comes_back_and_what_was_used_beyond_it_is_owed(
    world: World,
) -> None:
    limits = LimitSet(world.tenant(), tokens_per_minute=60)
    world.take(limits, Change("a", num_tokens=50))
    back = world.take(limits, Change("a", num_tokens=-45, must_fit=False))
    assert 55 * UNITS <= back.tokens_level < 60 * UNITS
    owed = world.take(limits, Change("a", num_tokens=100, must_fit=False))
    assert owed.tokens_level < -40 * UNITS
    refused = world.take(limits, Change("a", num_tokens=1))
    assert refused.refused_by is Quota.TOKENS
    assert refused.wait_millis > 40_000


# Behaviour of the limits that only Redis has.


def lease_holder(
    server: RedisServer, name: str, take_seconds: float = PATIENT_SECONDS
) -> RedisLimits:
    """The limits in Redis as the gateway `name` uses them. Its slots expire after 0.9 s."""
    local = MemoryLimits(lambda: time.monotonic_ns() // 1_000_000)
    return RedisLimits(
        *(RedisConnection(server.url), name, local),
        take_seconds=take_seconds,
        slot_lease_millis=900,
    )


@needs_redis
async def test_two_gateways_let_in_no_more_than_one_would(shared_redis: RedisServer) -> None:
    shared_redis.ask("FLUSHALL")
    one, two = lease_holder(shared_redis, "one"), lease_holder(shared_redis, "two")
    running = [asyncio.create_task(store.run()) for store in (one, two)]
    await until(lambda: one.num_gateways == two.num_gateways == 2)
    limits = LimitSet("together", requests_per_minute=10)
    changes = [Change(f"{n}", num_requests=1) for n in range(20)]
    standings = await asyncio.gather(
        *(store.take(limits, change) for store in (one, two) for change in changes)
    )
    assert sum(standing.refused_by is None for standing in standings) == 10
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@needs_redis
async def test_slots_are_held_while_their_gateway_lives(shared_redis: RedisServer) -> None:
    """Gateway one occupies a slot for much longer than the slot's lease. When the gateway ends, the
    slot and the gateway's share of the limit become free.
    """
    shared_redis.ask("FLUSHALL")
    one, two = lease_holder(shared_redis, "one"), lease_holder(shared_redis, "two")
    running = [asyncio.create_task(store.run()) for store in (one, two)]
    limits = LimitSet("slots", max_concurrent_requests=1)
    await until(lambda: one.num_gateways == 2)
    assert (await one.take(limits, Change("a", slot_change=HOLD))).refused_by is None
    for _ in range(20):
        await asyncio.sleep(0.1)
        taken = await two.take(limits, Change("b", slot_change=HOLD))
        assert taken.refused_by is Quota.CONCURRENCY
    shared_redis.ask("FLUSHALL")  # the gateway acquires its slots anew

    async def is_held() -> bool:
        return bool(await two._redis.call(lambda client: client.zcard("slots:{t:slots}")) == 1)

    async def is_free() -> bool:
        return (await two.take(limits, Change("b", slot_change=HOLD))).refused_by is None

    async with asyncio.timeout(60):
        while not await is_held():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running[0].cancel()
    async with asyncio.timeout(60):
        while not await is_free():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await until(lambda: two.num_gateways == 1)
    running[1].cancel()
    await asyncio.gather(*running, return_exceptions=True)


@needs_redis
async def test_a_burst_of_requests_does_not_count_as_a_failure_of_redis(
    shared_redis: RedisServer,
) -> None:
    shared_redis.ask("FLUSHALL")
    store = lease_holder(shared_redis, "one", 3 * busy_slowness() * TAKE_SECONDS)
    limits = LimitSet("burst", max_concurrent_requests=5000)
    for number in range(3):
        changes = [Change(f"{number}-{one}", slot_change=HOLD) for one in range(1200)]
        await asyncio.gather(*(store.take(limits, change) for change in changes))
        assert not store.is_lost
    await store._redis.close()


async def _renewal(server: RedisServer) -> None:
    """Waits until the gateway begins to renew the slots."""
    deadline = server.ask("ZSCORE", "slots:{t:0}", "a")
    await until(lambda: server.ask("ZSCORE", "slots:{t:0}", "a") != deadline)


@needs_redis
async def test_a_slot_that_is_released_while_slots_are_renewed_stays_free(
    shared_redis: RedisServer,
) -> None:
    shared_redis.ask("FLUSHALL")
    store = lease_holder(shared_redis, "one")
    tenants = [LimitSet(f"{number}", max_concurrent_requests=1) for number in range(300)]
    for tenant in tenants:
        assert (await store.take(tenant, Change("a", slot_change=HOLD))).refused_by is None
    running = asyncio.create_task(store.run())
    await _renewal(shared_redis)
    store.give_back(tenants[-1], Change("a", slot_change=RELEASE, must_fit=False))
    await _renewal(shared_redis)
    assert (await store.take(tenants[-1], Change("b", slot_change=HOLD))).refused_by is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@needs_redis
async def test_a_cancelled_request_takes_nothing(tmp_path: Path) -> None:
    """Its command was sent when the client disconnected, so Redis executes the command."""
    with redis_server(tmp_path / "redis") as server:
        store = lease_holder(server, "one")
        limits = LimitSet("cancelled", 100, 1000, 5)
        await store.take(limits, Change("b"))  # connects
        server.stop()
        taking = asyncio.create_task(store.take(limits, Change("a", 50, 500, HOLD)))
        await asyncio.sleep(0.1)
        taking.cancel()
        await asyncio.wait({taking})
        server.go_on()
        assert taking.cancelled()

        async def standing() -> Standing:
            return await store.take(limits, Change("b"))

        def is_full(left: Standing) -> bool:
            levels = left.requests_level, left.tokens_level, left.num_slots
            return levels == (100 * UNITS, 1000 * UNITS, 0)

        async with asyncio.timeout(10):  # to refill the levels takes 30 s
            while not is_full(await standing()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await store._redis.close()


@needs_redis
@pytest.mark.parametrize("loss", ["stopped", "killed"])
async def test_without_redis_each_gateway_counts_its_share_and_no_request_waits(
    tmp_path: Path, loss: str
) -> None:
    with redis_server(tmp_path / "redis") as server:
        one, two = (lease_holder(server, name, TAKE_SECONDS) for name in ("one", "two"))
        running = [asyncio.create_task(store.run()) for store in (one, two)]
        await until(lambda: one.num_gateways == two.num_gateways == 2)
        limits = LimitSet("apart", requests_per_minute=10, max_concurrent_requests=4)
        assert (await one.take(limits, Change("a", 2, slot_change=HOLD))).refused_by is None
        server.stop() if loss == "stopped" else server.kill()
        counts = []
        for store in (one, two):
            standings = []
            began = time.monotonic()
            for number in range(8):
                standings.append(await store.take(limits, Change(f"{number}", 1)))
            assert time.monotonic() - began < busy_slowness(), "a fraction of a second for all"
            counts.append(sum(standing.refused_by is None for standing in standings))
        assert counts == [4, 5], "half of the 8 that were left, and half of the whole"
        taken = [
            (await one.take(limits, Change(slot, slot_change=HOLD))).refused_by for slot in "bc"
        ]
        assert taken == [None, Quota.CONCURRENCY], "its share is 2, and one of them runs already"
        for slot in "ab":
            one.give_back(limits, Change(slot, slot_change=RELEASE, must_fit=False))
        server.go_on() if loss == "stopped" else server.start()
        await until(lambda: not one.is_lost and not two.is_lost)
        standing = await two.take(limits, Change("z", slot_change=HOLD))
        assert (standing.refused_by, standing.num_slots) == (None, 1), "none is left behind"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
