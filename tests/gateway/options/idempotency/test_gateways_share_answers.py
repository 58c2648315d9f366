"""Two gateway processes share one Redis. An answer survives the loss of the gateway that requested
it from the scheduler. The tests share the processes and must run in the order of this file, because
the last test kills a gateway.
"""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.gateway.fake_scheduler import FakeScheduler, formula
from tests.gateway.integration.transport.test_gateway_process import flags, process, serving_address
from tests.gateway.serving import until
from tests.plain_http import async_http_client
from tests.redis_servers import RedisServer, needs_redis, redis_server

pytestmark = [needs_redis, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7]
NUM_TOKENS = 24
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "return_token_ids": True}
SECONDS = 60.0


class Reader:
    def __init__(self, gateway: "Gateway", key: str) -> None:
        self.token_ids: list[int] = []
        self.ids: set[tuple[str, int]] = set()
        self.is_complete = False
        self.task = asyncio.create_task(self._read(gateway.http, {"Idempotency-Key": key}))

    async def _read(self, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        async with http.stream("POST", "/v1/completions", json=BODY, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    self.token_ids += chunk["choices"][0]["token_ids"]
                    self.ids.add((chunk["id"], chunk["created"]))
                self.is_complete |= line == "data: [DONE]"

    async def has(self, num_tokens: int) -> None:
        await until(lambda: len(self.token_ids) >= num_tokens)

    async def result(self) -> list[int]:
        async with asyncio.timeout(SECONDS):
            await self.task
        assert self.is_complete
        return self.token_ids


@dataclass
class Gateway:
    child: "subprocess.Popen[str]"
    http: httpx.AsyncClient

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(SECONDS):
            while await self.metric(name) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        async with asyncio.timeout(SECONDS):
            while (await self.http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@dataclass
class World:
    """Two gateways that are ready and use one scheduler."""

    a: Gateway
    b: Gateway
    scheduler: FakeScheduler
    redis: RedisServer

    def made(self) -> list[int]:
        seed = self.scheduler.adds[0].sampling.seed
        return [formula(PROMPT, seed, position) for position in range(NUM_TOKENS)]

    async def begun(self, key: str) -> Reader:
        """A client of the first gateway with five tokens, after which the scheduler stops."""
        self.scheduler.adds.clear()
        self.scheduler.permits = 0
        self.scheduler.allow(5)
        reader = Reader(self.a, key)
        await reader.has(5)
        return reader


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    scheduler = FakeScheduler(permits=0)
    async with AsyncExitStack() as stack, scheduler.running() as address:
        redis = stack.enter_context(redis_server(tmp_path_factory.mktemp("redis")))
        listen = (*flags(model, address), "--redis-url", redis.url)
        children = [stack.enter_context(process(*listen)) for _ in range(2)]
        gateways = []
        for child in children:
            at = await asyncio.to_thread(serving_address, child)
            client = async_http_client(base_url=f"http://{at}", timeout=SECONDS)
            gateways.append(Gateway(child, await stack.enter_async_context(client)))
        for gateway in gateways:
            await gateway.until_ready()
        yield World(*gateways, scheduler, redis)
        for child in children:
            child.send_signal(signal.SIGCONT)


async def test_a_key_that_is_taken_at_one_gateway_is_taken_at_the_other(world: World) -> None:
    first = await world.begun("taken")
    headers = {"Idempotency-Key": "taken"}
    other = BODY | {"max_tokens": 3}
    refused = await world.b.http.post("/v1/completions", json=other, headers=headers)
    assert refused.status_code == 422
    world.scheduler.run_freely()
    assert await first.result() == world.made()
    whole = await world.b.http.post(
        "/v1/completions", json=BODY | {"stream": False}, headers=headers
    )
    assert whole.json()["choices"][0]["token_ids"] == world.made()
    assert {(whole.json()["id"], whole.json()["created"])} == first.ids
    assert len(world.scheduler.adds) == 1


async def test_redis_away_costs_nothing_but_the_sharing(world: World) -> None:
    a, fake = world.a, world.scheduler
    first = await world.begun("redis away")
    world.redis.stop()
    fake.allow(5)
    await first.has(10)
    again = Reader(a, "redis away")
    await again.has(10)
    await a.until_metric("stepwell_idempotent_sharing", 0)
    world.redis.go_on()
    await a.until_metric("stepwell_idempotent_sharing", 1)
    await world.b.until_metric("stepwell_idempotent_sharing", 1)
    late = Reader(world.b, "redis away")
    await late.has(10)
    assert len(fake.adds) == 1
    world.redis.kill()
    world.redis.start()  # Redis has lost all data
    fake.run_freely()
    for reader in (first, again, late):
        assert await reader.result() == world.made()
    await a.until_metric("stepwell_idempotent_sharing", 1)
    await world.b.until_metric("stepwell_idempotent_sharing", 1)


async def test_a_gateway_that_was_stopped_finds_that_it_was_replaced(world: World) -> None:
    a, b, fake = world.a, world.b, world.scheduler
    first = await world.begun("stopped")
    second = Reader(b, "stopped")
    await second.has(5)
    a.child.send_signal(signal.SIGSTOP)
    await until(lambda: len(fake.adds) == 2)
    while len(second.token_ids) < 8:
        fake.allow(1)
        await asyncio.sleep(0.01)
    a.child.send_signal(signal.SIGCONT)
    await a.until_metric("stepwell_idempotent_answers_fenced_total", 1)
    fake.run_freely()
    for reader in (first, second):
        assert await reader.result() == world.made()
    assert first.ids == second.ids
    third, fourth = Reader(a, "stopped"), Reader(b, "stopped")
    assert await third.result() == await fourth.result() == world.made()
    assert len({(add.sampling.seed, add.request_id) for add in fake.adds}) == 1


async def test_an_answer_is_followed_and_survives_its_gateway(world: World) -> None:
    a, b, fake = world.a, world.b, world.scheduler
    first = await world.begun("killed")
    follower = Reader(b, "killed")
    await follower.has(5)
    assert len(fake.adds) == 1
    a.child.kill()
    with pytest.raises(httpx.TransportError):
        await first.task
    await until(lambda: len(fake.adds) == 2)  # gateway b continues after the lease's end
    late = Reader(b, "killed")
    fake.run_freely()
    for reader in (follower, late):
        assert await reader.result() == world.made()
        assert reader.ids == first.ids
    first_add, second_add = fake.adds
    assert second_add.sampling == first_add.sampling
    assert second_add.request_id == first_add.request_id
    assert second_add.arrival_unix_nanos == first_add.arrival_unix_nanos
    assert len(second_add.output_token_ids) == 4 * 5
