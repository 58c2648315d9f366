"""Two replicas behind one gateway: what hangs or cannot run steps costs its streams seconds."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.soak.replicas import Replicas
from services.cli.settings import UpSettings
from services.cli.supervisor import RestartPolicy
from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, connect, generate, request
from tests.e2e.prompts import PROMPTS, random_tokens
from tests.plain_http import http_get

NUM_STREAMS = 6
NUM_TOKENS = 300
HIT_AT = 40
# Three seconds of silence make a session hung; the rest is room for a busy machine.
LONGEST_GAP_SECONDS = 10.0


@pytest.fixture
async def replicas(tiny_model: TinyModel) -> AsyncIterator[Replicas]:
    settings = UpSettings(
        model=tiny_model.directory, dtype="float32", num_threads=1, num_blocks=1000, replicas=2
    )
    # Sockets lie in the directory: its path must be short.
    with tempfile.TemporaryDirectory(prefix="stepwell-two-") as directory:
        async with Replicas(settings, Path(directory), RestartPolicy()) as running:
            yield running


@pytest.mark.parametrize("victim", ["scheduler-0", "kvpool-0"])
async def test_streams_go_on_when_a_service_of_one_replica_is_stopped(
    victim: str, replicas: Replicas
) -> None:
    gaps: list[float] = []
    was_hit = False

    async def ask(number: int) -> Answer:
        last = time.monotonic()

        def on_tokens(num_tokens: int) -> None:
            nonlocal last, was_hit
            if not was_hit and num_tokens >= HIT_AT:
                was_hit = True
                os.kill(replicas.pid(victim), signal.SIGSTOP)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

        return await generate(stub, request(PROMPTS[number], NUM_TOKENS), on_tokens)

    async with connect(replicas.grpc) as stub:
        undisturbed = await asyncio.gather(
            *(generate(stub, request(prompt, NUM_TOKENS)) for prompt in PROMPTS[:NUM_STREAMS])
        )
        disturbed = await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))
    assert was_hit
    assert [answer.token_ids for answer in disturbed] == [a.token_ids for a in undisturbed]
    assert max(gaps) < LONGEST_GAP_SECONDS


async def test_a_new_gateway_sends_conversations_to_where_they_are_cached(
    replicas: Replicas,
) -> None:
    conversations = [random_tokens(2_000 + number, 100) for number in range(8)]

    async def ask_all() -> list[Answer]:
        async with connect(replicas.grpc) as stub:
            return [await generate(stub, request(tokens, 8)) for tokens in conversations]

    answers = await ask_all()
    assert [answer.num_cached_tokens for answer in answers] == [0] * len(conversations)
    for tokens, answer in zip(conversations, answers, strict=True):
        tokens.extend(answer.token_ids)
    before = replicas.record.num_ready["gateway"]
    os.kill(replicas.pid("gateway"), signal.SIGKILL)
    async with asyncio.timeout(60):
        while replicas.record.num_ready["gateway"] == before:
            replicas.record.changed.clear()
            await replicas.record.changed.wait()
    url = f"http://{replicas.http}/metrics"
    metrics = ""
    async with asyncio.timeout(60):
        while metrics.count('state="exact"} 1.0') < 3:  # the index, and each replica's part of it
            metrics = (await asyncio.to_thread(http_get, url)).text
            await asyncio.sleep(0.05)
    cached = [answer.num_cached_tokens for answer in await ask_all()]
    assert min(cached) >= 96, "all blocks of the first turn, wherever that was"
