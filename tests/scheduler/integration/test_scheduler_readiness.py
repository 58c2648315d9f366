"""Whether a replica is ready, as the scheduler reports it to gateways and health checks."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import open_channel
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import (
    SECONDS,
    Gateway,
    Replica,
    gateway_of,
    sampling,
    serving_replica,
)
from tests.scheduler.story import prompt

SCHEDULER = "stepwell.scheduler.v1.Scheduler"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def until_health(replica: Replica, service: str, status: int) -> None:
    async with open_channel(replica.address) as channel, asyncio.timeout(SECONDS):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        while (await health.Check(request)).status != status:  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.01)


async def until_state(gateway: Gateway, *, ready: bool) -> None:
    await gateway.until(lambda: gateway.states[-1:] != [] and gateway.states[-1].ready is ready)


async def test_a_session_is_told_that_the_replica_is_ready_and_told_again_every_second() -> None:
    async with serving_replica() as replica, gateway_of(replica) as gateway:
        await gateway.until(lambda: len(gateway.states) >= 3)
    for state in gateway.states:
        assert (state.ready, state.reason, state.draining) == (True, "", False)


async def test_a_replica_without_its_worker_is_not_ready_but_live() -> None:
    async with serving_replica() as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9), sampling=sampling(100))
        await gateway.until_tokens(1, 3)
        await replica.worker.stop()
        await until_state(gateway, ready=False)
        state = gateway.states[-1]
        assert "the worker at" in state.reason
        assert not state.draining
        await until_health(replica, SCHEDULER, NOT_SERVING)
        await until_health(replica, "", SERVING)
        async with gateway_of(replica) as second:
            await second.until(lambda: len(second.states) > 0)
            assert second.states[0].reason == state.reason, "a new session gets the state at once"
        await replica.worker.start()
        await until_state(gateway, ready=True)
        await until_health(replica, SCHEDULER, SERVING)
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), 100)


async def test_an_idle_replica_notices_that_its_worker_is_away() -> None:
    async with serving_replica() as replica, gateway_of(replica) as gateway:
        await until_state(gateway, ready=True)
        await replica.worker.stop()
        await until_state(gateway, ready=False)
        assert "the worker at" in gateway.states[-1].reason
        await replica.worker.start()
        await until_state(gateway, ready=True)
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), 8)


async def test_an_idle_replica_notices_that_its_pool_is_away() -> None:
    async with serving_replica(pool_timeout_seconds=0.5) as replica, gateway_of(replica) as gateway:
        await until_state(gateway, ready=True)
        await replica.pool.stop()
        await until_state(gateway, ready=False)
        assert "the kvpool" in gateway.states[-1].reason
        await replica.pool.start()
        await until_state(gateway, ready=True)


async def test_an_idle_replica_whose_connection_to_the_pool_breaks_keeps_its_cache() -> None:
    async with serving_replica(cuttable=True) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(10))
        await gateway.finish(1)
        await replica.until_idle()
        known = replica.pool_link.num_connections
        replica.pool_link.cut()
        async with asyncio.timeout(SECONDS):
            while replica.pool_link.num_connections == known:  # noqa: ASYNC110 - another's state
                await asyncio.sleep(0.01)
        await gateway.add(2, prompt(10))
        await gateway.finish(2)
        assert gateway.heard[2].num_cached_tokens == 8
        assert all(state.ready for state in gateway.states)


async def test_a_replica_that_drains_says_so_and_finishes_what_it_has() -> None:
    async with serving_replica(drain_seconds=SECONDS) as replica, gateway_of(replica) as gateway:
        replica.worker.going.clear()
        await gateway.add(1, prompt(9))
        await replica.until(lambda stats: stats.num_running == 1)
        replica.stop.set()
        await until_state(gateway, ready=False)
        assert gateway.states[-1].draining
        replica.worker.going.set()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), 8)
        await gateway.until_ended()
    assert not isinstance(gateway.error, grpc.aio.AioRpcError)
