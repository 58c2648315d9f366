"""A gateway finds its schedulers in Redis and in DNS."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import Unavailable
from services.common.process.settings import SettingError, parse_settings
from services.gateway.adapters.discovery.discovery import Watcher
from services.gateway.settings import GatewaySettings
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.registered import registered
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.streams import Stream, expected
from tests.redis_servers import RedisServer, needs_redis, redis_server

# The gateway reads the registry, and schedulers renew their leases of 3 s, every second.
UP, ADDRESSES, FAILURES = (
    f'stepwell_discovery_{name}{{source="redis"}}' for name in ("up", "addresses", "failures_total")
)


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    shared_redis.ask("FLUSHALL")
    return shared_redis


@asynccontextmanager
async def discovering(model: Path, redis: RedisServer, **settings: Any) -> AsyncIterator[Serving]:
    values = {"schedulers": None, "redis_url": redis.url, "num_ready": 0} | settings
    async with serving(model, **values) as served:
        yield served


def addresses(served: Serving) -> list[str]:
    return [replica.address for replica in served.gateway.membership.replicas]


async def until_ready(served: Serving, *schedulers: FakeScheduler) -> None:
    wanted = {scheduler.address for scheduler in schedulers}

    def holds() -> bool:
        ready = {replica.address for replica in served.gateway.membership.ready()}
        return ready == wanted == set(addresses(served))

    await until(holds)


async def complete(served: Serving) -> int:
    answer = await served.http.post("/v1/completions", json={"prompt": "the", "max_tokens": 4})
    return answer.status_code


async def metric(served: Serving, name: str) -> float:
    text = (await served.http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


async def until_metric(served: Serving, name: str, holds: Callable[[float], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not holds(await metric(served, name)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@needs_redis
async def test_a_scheduler_joins_two_gateways_and_disappears_with_its_lease(
    model: Path, redis: RedisServer
) -> None:
    async with discovering(model, redis) as first, discovering(model, redis) as second:
        refused = await first.http.get("/health")
        assert (refused.status_code, refused.json()["reason"]) == (
            503,
            "no replica is ready: none is known",
        )
        async with registered(redis.url) as a, registered(redis.url) as b:
            for gateway in (first, second):
                await until_ready(gateway, a.scheduler, b.scheduler)
            streams = [Stream(gateway) for gateway in (first, second) for _ in range(4)]
            await asyncio.gather(*(stream.task for stream in streams))
            assert [stream.token_ids for stream in streams] == [expected(30)] * 8
            assert min(len(a.scheduler.adds), len(b.scheduler.adds)) > 0
            assert await metric(first, ADDRESSES) == 2
            assert await metric(first, 'stepwell_gateway_replicas{model_name="tiny"}') == 2
            await b.die()
            assert await complete(first) == 200
            for gateway in (first, second):
                await until_ready(gateway, a.scheduler)
            sessions = b.scheduler.num_sessions
            async with registered(redis.url, b.scheduler):
                for gateway in (first, second):
                    await until_ready(gateway, a.scheduler, b.scheduler)
                assert b.scheduler.num_sessions == sessions + 2, "nothing else tries to reach it"


@needs_redis
async def test_requests_before_the_first_replica_count_as_in_flight_and_wait_for_it(
    model: Path, redis: RedisServer
) -> None:
    """As where an autoscaler starts replicas only if there are requests in flight."""
    in_flight = 'stepwell_gateway_requests_in_flight{model_name="tiny"}'
    async with discovering(model, redis) as served:
        leaving = asyncio.create_task(complete(served))
        waiting, stream = asyncio.create_task(complete(served)), Stream(served)
        await until_metric(served, in_flight, lambda number: number == 3)
        leaving.cancel()
        await until_metric(served, in_flight, lambda number: number == 2)
        async with registered(redis.url):
            assert await waiting == 200
            await stream.task
        assert (stream.error, stream.token_ids) == (None, expected(30))


@needs_redis
async def test_one_that_drains_leaves_without_an_error_for_what_runs_there(
    model: Path, redis: RedisServer
) -> None:
    async with (
        discovering(model, redis, routing_policy="round-robin") as served,
        registered(redis.url, FakeScheduler(permits=0)) as stays,
        registered(redis.url, FakeScheduler(permits=0)) as leaves,
    ):
        await until_ready(served, stays.scheduler, leaves.scheduler)
        streams = [Stream(served) for _ in range(16)]
        await until(lambda: leaves.scheduler.num_running == 8)
        leaves.scheduler.allow(5)
        await until(lambda: sum(len(stream.token_ids) for stream in streams) == 40)
        await leaves.leave()
        stays.scheduler.run_freely()
        late = [Stream(served) for _ in range(8)]
        await asyncio.gather(*(stream.task for stream in late))
        assert len(leaves.scheduler.adds) == 8, "it gets no new requests"
        await asyncio.sleep(1.5)  # the gateway keeps an unregistered replica while it has streams
        assert leaves.scheduler.address in addresses(served)
        leaves.scheduler.allow(5)
        await until(lambda: sum(len(stream.token_ids) for stream in streams) == 8 * 30 + 80)
        # The end of the drain. Sequences that still run continue at the other scheduler.
        await leaves.scheduler.die()
        await asyncio.gather(*(stream.task for stream in streams))
        await until_ready(served, stays.scheduler)
        for stream in (*streams, *late):
            assert (stream.error, stream.token_ids) == (None, expected(30))


@needs_redis
async def test_what_is_registered_for_another_model_does_not_join(
    model: Path, redis: RedisServer
) -> None:
    async with (
        discovering(model, redis) as served,
        registered(redis.url) as good,
        registered(redis.url, model_name="another") as another,
    ):
        await until_ready(served, good.scheduler)
        wrong = FakeScheduler(fingerprint=b"g" * 32)
        async with registered(redis.url, wrong):
            await until(lambda: len(served.gateway.membership.not_ready()) == 1)
            await until(lambda: "fingerprint" in served.gateway.membership.replicas[1].reason)
            for _ in range(4):
                assert await complete(served) == 200
            assert (wrong.adds, another.scheduler.adds) == ([], [])
            assert another.scheduler.address not in addresses(served)


@needs_redis
async def test_a_list_in_the_settings_stays_beside_the_registry(
    model: Path, redis: RedisServer
) -> None:
    listed = FakeScheduler()
    async with serving(model, listed, redis_url=redis.url) as served:
        async with registered(redis.url) as joined:
            await until_ready(served, listed, joined.scheduler)
            await listed.die()
            await until(lambda: served.gateway.membership.num_ready == 1)
            assert await complete(served) == 200
        await listed.start()
        await until_ready(served, listed)


@needs_redis
async def test_an_emptied_or_restarted_redis_costs_no_request_anything(
    model: Path, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as redis:
        async with discovering(model, redis) as served, registered(redis.url) as a:
            await until_ready(served, a.scheduler)
            sessions = a.scheduler.num_sessions
            stream = Stream(served, {"max_tokens": 400})
            redis.ask("FLUSHALL")
            assert await complete(served) == 200
            redis.kill()
            await until_metric(served, FAILURES, lambda failures: failures > 0)
            assert await metric(served, UP) == 0
            assert await complete(served) == 200
            redis.start()
            async with registered(redis.url) as b:
                await until_ready(served, a.scheduler, b.scheduler)
                await until_metric(served, ADDRESSES, lambda number: number == 2)
                assert await metric(served, UP) == 1
            await stream.task
            assert (stream.error, len(stream.token_ids)) == (None, 400)
            assert a.scheduler.num_sessions == sessions, "its session went on all the time"


@needs_redis
async def test_redis_may_be_stopped_while_schedulers_join_die_and_leave(
    model: Path, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as redis:
        async with (
            discovering(model, redis) as served,
            registered(redis.url) as stays,
            registered(redis.url) as dies,
            registered(redis.url) as leaves,
        ):
            await until_ready(served, stays.scheduler, dies.scheduler, leaves.scheduler)
            redis.stop()
            until_later = asyncio.create_task(asyncio.sleep(5))
            async with registered(redis.url) as joins:
                await dies.die()
                began = asyncio.get_running_loop().time()
                await leaves.leave()
                assert asyncio.get_running_loop().time() - began < 4, (
                    "a call of Redis ends after half a second"
                )
                while not until_later.done():
                    assert await complete(served) == 200
                    await asyncio.sleep(0.05)
                assert joins.scheduler.address not in addresses(served)
                assert dies.scheduler.address in addresses(served)
                await leaves.scheduler.die()
                redis.go_on()
                await until_ready(served, stays.scheduler, joins.scheduler)


# DNS.


async def test_a_name_gives_all_of_its_addresses_for_a_port(model: Path) -> None:
    scheduler = FakeScheduler()
    port = (await scheduler.start()).rpartition(":")[2]
    name = f"dns:localhost:{port}"
    async with serving(model, schedulers=(name,), num_ready=1) as served:
        assert f"127.0.0.1:{port}" in addresses(served)
        assert await complete(served) == 200
        assert await metric(served, f'stepwell_discovery_up{{source="{name}"}}') == 1
    await scheduler.die()


async def test_a_name_that_cannot_be_resolved_is_looked_up_again(model: Path) -> None:
    name = "dns:no-such-name.invalid:9001"
    async with serving(model, schedulers=(name,), num_ready=0) as served:
        failures = f'stepwell_discovery_failures_total{{source="{name}"}}'
        await until_metric(served, failures, lambda number: number > 0)
        health = await served.http.get("/health")
        assert health.json()["reason"] == "no replica is ready: none is known"


async def test_what_a_name_gave_last_is_kept_while_it_gives_nothing() -> None:
    answers: list[set[str] | Unavailable] = [{"b:1", "a:1"}, Unavailable("no answer"), {"c:1"}]
    named: list[list[str]] = []

    async def look() -> set[str]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    watcher = Watcher("dns:x:1", look, lambda _, found: named.append(list(found)), 0.001)
    task = asyncio.create_task(watcher.run())
    await until(lambda: len(named) > 1)
    task.cancel()
    assert named[:2] == [["a:1", "b:1"], ["c:1"]]
    assert (watcher.is_up, watcher.num_failures, watcher.num_addresses) == (True, 1, 1)


# Settings.


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ((), ("127.0.0.1:9001",)),
        (("--redis-url", "redis://h"), ()),
        (("--redis-url", "redis://h", "--schedulers", ""), ()),
        (("--redis-url", "redis://h", "--schedulers", "a:1,unix:/b"), ("a:1", "unix:/b")),
        (("--schedulers", "dns:name:9001"), ("dns:name:9001",)),
    ],
)
def test_the_schedulers_that_need_no_registry(
    model: Path, flags: tuple[str, ...], known: tuple[str, ...]
) -> None:
    settings = parse_settings(GatewaySettings, "gateway", ["--model", str(model), *flags], {})
    assert settings.known_schedulers == known


def test_some_scheduler_must_be_known(model: Path) -> None:
    settings = GatewaySettings(model=model, schedulers=())
    with pytest.raises(SettingError, match="--schedulers must name at least one, or --redis-url"):
        _ = settings.known_schedulers
    with pytest.raises(SettingError, match="must be host:port, unix:PATH or dns:NAME:PORT each"):
        parse_settings(
            GatewaySettings, "gateway", ["--model", str(model), "--schedulers", "dns:name"], {}
        )
