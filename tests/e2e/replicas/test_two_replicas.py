"""Two replicas behind one gateway. If one hangs or cannot run steps, its streams are delayed only
by seconds. The gateway's index has the cached blocks of both.
"""

import asyncio
import os
import re
import signal
import time

import pytest

from tests.e2e.inference import Answer, connect, generate, request
from tests.e2e.prompts import PROMPTS, random_tokens
from tests.e2e.stack import Stack, wait_for
from tests.plain_http import http_get, http_post

NUM_STREAMS = 6
NUM_TOKENS = 150
HIT_AT = 40
# The gateway gives a session up after three silent seconds. The rest is for a busy machine.
LONGEST_GAP_SECONDS = 10.0


def follows_two(stack: Stack) -> bool:
    """Whether the gateway's index equals the cached blocks of both replicas and is not empty."""
    metrics = http_get(f"{stack.url}/metrics").text
    nodes = re.findall(
        r'^stepwell_prefix_index_node_state\{node="replica-\d-\w+",state="exact"\} 1\.0$',
        metrics,
        re.M,
    )
    is_exact = 'stepwell_prefix_index_state{state="exact"} 1.0' in metrics
    keys = re.findall(r"^stepwell_prefix_index_keys (\S+)$", metrics, re.M)
    return is_exact and len(nodes) == 2 and float(keys[0]) > 0


def test_without_redis_the_gateway_follows_the_pools_themselves(demo_replicas: Stack) -> None:
    body = {"model": demo_replicas.model, "prompt": "one two three four five six", "max_tokens": 16}
    answer = http_post(f"{demo_replicas.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    wait_for(lambda: follows_two(demo_replicas))


@pytest.mark.parametrize("victim", ["scheduler-0", "kvpool-0"])
async def test_streams_go_on_when_a_service_of_one_replica_is_stopped(
    victim: str, demo_replicas: Stack
) -> None:
    wait_for(lambda: follows_two(demo_replicas))
    pid = demo_replicas.pids()[victim]
    gaps: list[float] = []
    was_hit = False

    async def ask(number: int) -> Answer:
        last = time.monotonic()

        def on_tokens(num_tokens: int) -> None:
            nonlocal last, was_hit
            if not was_hit and num_tokens >= HIT_AT:
                was_hit = True
                os.kill(pid, signal.SIGSTOP)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

        return await generate(stub, request(PROMPTS[number], NUM_TOKENS), on_tokens)

    async with connect(demo_replicas.grpc) as stub:
        undisturbed = await asyncio.gather(
            *(generate(stub, request(prompt, NUM_TOKENS)) for prompt in PROMPTS[:NUM_STREAMS])
        )
        disturbed = await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))
    assert was_hit
    assert [answer.token_ids for answer in disturbed] == [a.token_ids for a in undisturbed]
    assert max(gaps) < LONGEST_GAP_SECONDS


async def test_a_new_gateway_sends_conversations_to_where_they_are_cached(
    demo_replicas: Stack,
) -> None:
    conversations = [random_tokens(2_000 + number, 100) for number in range(8)]

    async def ask_all() -> list[Answer]:
        async with connect(demo_replicas.grpc) as stub:
            return [await generate(stub, request(tokens, 8)) for tokens in conversations]

    answers = await ask_all()
    assert [answer.num_cached_tokens for answer in answers] == [0] * len(conversations)
    for tokens, answer in zip(conversations, answers, strict=True):
        tokens.extend(answer.token_ids)
    killed = demo_replicas.pids()["gateway"]
    demo_replicas.hit("gateway")
    demo_replicas.wait_until_back("gateway", killed)
    wait_for(lambda: follows_two(demo_replicas))
    cached = [answer.num_cached_tokens for answer in await ask_all()]
    assert min(cached) >= 96, "all blocks of the first turn, wherever that was"
