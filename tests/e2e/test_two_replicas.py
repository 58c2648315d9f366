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
from tests.e2e.prompts import PROMPTS

NUM_STREAMS = 6
NUM_TOKENS = 300
HIT_AT = 40
# Three seconds of silence make a session hung; the rest is room for a busy machine.
LONGEST_GAP_SECONDS = 10.0


@pytest.fixture
async def replicas(tiny_model: TinyModel) -> AsyncIterator[Replicas]:
    settings = UpSettings(
        model=tiny_model.directory, dtype="float32", num_threads=1, num_blocks=1000
    )
    # Sockets lie in the directory: its path must be short.
    with tempfile.TemporaryDirectory(prefix="stepwell-two-") as directory:
        async with Replicas(settings, 2, Path(directory), RestartPolicy()) as running:
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
