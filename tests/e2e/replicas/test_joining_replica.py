"""A second replica joins `stepwell up --redis-url`, drains, joins again, and stops completely."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import connect, generate, request
from tests.e2e.other_replica import OtherReplica
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.plain_http import http_get
from tests.redis_servers import RedisServer, needs_redis, redis_server

NUM_STREAMS = 16
NUM_TOKENS = 300
LONGEST_SILENCE_SECONDS = 5.0
"""For how long a stream may be silent after its replica stopped completely, on a busy machine. It
is much less than --drain-seconds.
"""

pytestmark = [needs_redis, pytest.mark.slow]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def stack(tiny_model: TinyModel, redis: RedisServer) -> Iterator[Stack]:
    flags = ("--redis-url", redis.url, "--num-blocks", "200", "--routing-policy", "least-loaded")
    stack = Stack(tiny_model.directory, *flags)
    yield stack
    stack.close()


@pytest.fixture
def other(tiny_model: TinyModel, redis: RedisServer, tmp_path: Path) -> Iterator[OtherReplica]:
    replica = OtherReplica(tiny_model.directory, redis.url, tmp_path)
    yield replica
    replica.close()


def replicas(stack: Stack) -> dict[str, dict[str, Any]]:
    """Maps the address of each replica to its entry in the gateway's status."""
    found = http_get(f"{stack.url}/status").json()["replicas"]
    return {replica["address"]: replica for replica in found}


def is_ready(stack: Stack, address: str) -> bool:
    return bool(replicas(stack).get(address, {}).get("ready"))


async def ask_all(stack: Stack, when_half_done: Any = None) -> list[list[int]]:
    """The tokens of concurrent streams. None may be silent for long after `when_half_done`."""
    halfway = asyncio.Event()
    begun: set[int] = set()

    async def ask(prompt: list[int]) -> list[int]:
        last = time.monotonic()

        def on_tokens(num_tokens: int) -> None:
            nonlocal last
            before, last = last, time.monotonic()
            assert not halfway.is_set() or last - before < LONGEST_SILENCE_SECONDS
            begun.add(id(prompt))
            if num_tokens >= NUM_TOKENS // 4 and len(begun) == NUM_STREAMS:
                halfway.set()

        return (await generate(stub, request(prompt, NUM_TOKENS), on_tokens)).token_ids

    async def act() -> None:
        await halfway.wait()
        if when_half_done is not None:
            await asyncio.to_thread(when_half_done)

    async with connect(stack.grpc) as stub, asyncio.TaskGroup() as tasks:
        tasks.create_task(act())
        asked = [tasks.create_task(ask(prompt)) for prompt in PROMPTS[:NUM_STREAMS]]
    return [task.result() for task in asked]


async def test_a_replica_joins_drains_under_streams_comes_back_and_stops_as_a_whole(
    stack: Stack, other: OtherReplica
) -> None:
    alone = await ask_all(stack)
    await asyncio.to_thread(wait_for, lambda: is_ready(stack, other.address), 60)

    def drain() -> None:
        assert replicas(stack)[other.address]["unfinished_here"] == NUM_STREAMS // 2
        other.signal("scheduler", signal.SIGTERM)

    assert await ask_all(stack, drain) == alone
    assert other.wait("scheduler") == 0
    await asyncio.to_thread(wait_for, lambda: other.address not in replicas(stack), 5)

    other.start("scheduler")
    await asyncio.to_thread(wait_for, lambda: is_ready(stack, other.address), 30)

    def stop_all() -> None:
        for service in ("worker", "kvpool", "scheduler"):
            other.signal(service, signal.SIGTERM)

    assert await ask_all(stack, stop_all) == alone
    assert [other.wait(service) for service in ("worker", "kvpool", "scheduler")] == [0, 0, 0]
    await asyncio.to_thread(wait_for, lambda: other.address not in replicas(stack), 10)
    assert stack.healthy()
