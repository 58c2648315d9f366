"""A scheduler is registered in Redis for as long as it accepts requests."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from services.common.process.settings import SettingError
from services.scheduler.adapters.gateways import registration as registration_module
from services.scheduler.adapters.gateways.registration import Registration
from services.scheduler.settings import SchedulerSettings
from tests.redis_servers import RedisServer, needs_redis, redis_server, until

if needs_redis.args[0]:
    pytest.skip(needs_redis.kwargs["reason"], allow_module_level=True)

from services.common.redis import client as redis_client
from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.common.redis.fleet_registry import FleetRegistry, RegisteredReplica
from tests.scheduler.paged_model import continuation
from tests.scheduler.scheduler_process import SchedulerProcess, running_scheduler
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

ADVERTISED = "10.0.0.7:9001"
SETTINGS = {"kvpool": "127.0.0.1:1", "workers": ("127.0.0.1:2",)}


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def registry(server: RedisServer) -> AsyncIterator[FleetRegistry]:
    redis = RedisConnection(server.url)
    yield FleetRegistry(redis, "paged")
    await redis.close()


async def registered(registry: FleetRegistry, number: int) -> list[RegisteredReplica]:
    async with asyncio.timeout(60):
        while True:
            with suppress(RedisUnavailable):
                if len(found := await registry.replicas()) == number:
                    return found
            await asyncio.sleep(0.02)


async def test_it_is_registered_under_what_it_serves_until_it_drains(
    server: RedisServer, registry: FleetRegistry
) -> None:
    settings = {"redis_url": server.url, "advertise_address": ADVERTISED, "drain_seconds": 10.0}
    redis = RedisConnection(server.url)
    async with serving_replica(**settings) as replica, gateway_of(replica) as gateway:
        (found,) = await registered(registry, 1)
        assert found.address == ADVERTISED
        assert gateway.opened is not None
        assert found.node == gateway.opened.cache_node
        await gateway.add(1, prompt(9), sampling=sampling(100))
        await gateway.until_tokens(1, 2)
        replica.worker.going.clear()
        # An expired registration stays in Redis until another replica renews its own.
        await FleetRegistry(redis, "paged", 60.0).renew(RegisteredReplica("10.0.0.8:9001", "b"))
        replica.stop.set()
        await registered(registry, 1)
        assert await redis.call(lambda client: client.zcard("fleet:{paged}:replicas")) == 1
        assert not replica.serving.done(), "a request runs"
        replica.worker.going.set()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), 100)
    await redis.close()


async def test_it_takes_requests_until_redis_has_been_told(
    server: RedisServer, registry: FleetRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "LEAVE_SECONDS", 10.0)
    monkeypatch.setattr(redis_client, "SOCKET_SECONDS", 10.0)
    settings = {"redis_url": server.url, "advertise_address": ADVERTISED, "drain_seconds": 10.0}
    async with serving_replica(**settings) as replica, gateway_of(replica) as gateway:
        await registered(registry, 1)
        server.stop()
        replica.stop.set()
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        assert gateway.heard[1].rejected is None
        assert not gateway.states[-1].draining
        server.go_on()
        await gateway.until(lambda: gateway.states[-1].draining)
        assert await registry.replicas() == []


async def test_it_registers_itself_again_after_any_loss(
    server: RedisServer, registry: FleetRegistry
) -> None:
    settings = {"redis_url": server.url, "advertise_address": ADVERTISED}
    async with serving_replica(**settings) as replica, gateway_of(replica) as gateway:
        before = await registered(registry, 1)
        server.ask("FLUSHALL")
        await registered(registry, 0)
        assert await registered(registry, 1) == before
        server.kill()
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        await asyncio.to_thread(server.start)
        assert await registered(registry, 1) == before
        server.stop()
        await gateway.add(2, prompt(9))
        await gateway.finish(2)
        assert gateway.heard[1].tokens == gateway.heard[2].tokens == continuation(prompt(9), 8)
        server.go_on()
        assert await registered(registry, 1) == before


async def test_metrics_say_whether_it_is_registered(server: RedisServer) -> None:
    registration = Registration(
        SchedulerSettings(**SETTINGS, redis_url=server.url, address=ADVERTISED)
    )

    def values() -> dict[str, float]:
        return {f.name: f.samples[0].value for f in registration.collect()}

    up, failures = "stepwell_registration_up", "stepwell_registration_failures"
    assert values() == {up: 0, failures: 0}
    task = asyncio.create_task(registration.run(ADVERTISED, "paged", "node"))
    await until(lambda: values()[up] == 1)
    server.kill()
    await until(lambda: values()[failures] > 0)
    assert values()[up] == 0
    await asyncio.to_thread(server.start)
    await until(lambda: values()[up] == 1)
    task.cancel()
    await registration.close()


async def test_a_process_that_is_killed_disappears_with_its_lease(
    server: RedisServer, registry: FleetRegistry
) -> None:
    flags = ("--redis-url", server.url, "--advertise-address", ADVERTISED)
    async with running_scheduler(*flags) as running:
        await registered(registry, 1)
        running.scheduler.process.send_signal(signal.SIGKILL)
        await running.scheduler.wait()
        await registered(registry, 0)


async def test_a_wrong_password_ends_the_start(tmp_path) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as server:
        url = f"redis://:wrong@127.0.0.1:{server.port}"
        flags = ("--kvpool", "127.0.0.1:1", "--workers", "127.0.0.1:2", "--redis-url", url)
        process = await SchedulerProcess.start(*flags)
        assert await process.wait() == 2
    assert process.errors[-1].startswith(
        f"stepwell scheduler: --redis-url {server.url}: Redis refuses user or password"
    )


@pytest.mark.parametrize("address", ["0.0.0.0:9001", "[::]:9001", "unix:/run/scheduler.sock"])
def test_an_address_that_others_cannot_reach_is_not_registered(address: str) -> None:
    known = {**SETTINGS, "redis_url": "redis://h", "address": address}
    with pytest.raises(SettingError) as caught:
        Registration(SchedulerSettings(**known))
    assert str(caught.value) == (
        "--advertise-address must be given with --redis-url: gateways on other machines cannot "
        f"reach this scheduler at {address}"
    )
    Registration(SchedulerSettings(**known, advertise_address="10.0.0.7:9001"))


def test_an_address_to_advertise_needs_a_registry() -> None:
    with pytest.raises(SettingError, match="--advertise-address needs --redis-url"):
        Registration(SchedulerSettings(**SETTINGS, advertise_address=ADVERTISED))
