"""Clients that connect, read one token and disappear leave nothing behind."""

import asyncio

import httpx

from tests.e2e.inference import connect, generate, request
from tests.e2e.prompts import PROMPTS, random_tokens
from tests.e2e.stack import Stack
from tests.plain_http import async_http_client

WAVE = 50
NUM_WARM_UP_WAVES = 3
NUM_WAVES = 10
NUM_TOKENS = 1_500
MOST_GROWTH_BYTES = 16 * 2**20


async def wave(stack: Stack, number: int) -> None:
    """Runs fifty clients at once. Each sends its own prompt, and disconnects after one token."""

    async def client(name: str) -> None:
        body = {
            "model": stack.model,
            "prompt": f"{name}: something to talk about for a long while",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            async_http_client(timeout=60) as http,
            http.stream("POST", f"{stack.url}/v1/completions", json=body) as response,
        ):
            assert response.status_code == httpx.codes.OK
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    return

    await asyncio.gather(*(client(f"client {number}.{i}") for i in range(WAVE)))


async def test_five_hundred_vanishing_clients_leave_nothing_behind(stack: Stack) -> None:
    async with connect(stack.grpc) as stub:
        before = await generate(stub, request(PROMPTS[3], 20))
        # Warm-up: buffers, kernels and thread pools reach their full size in steps of all lengths.
        for length in range(4, 1_024, 12):
            await generate(stub, request(random_tokens(length, length), 1))
        for number in range(NUM_WARM_UP_WAVES):
            await wave(stack, number)
        memory = stack.resident_bytes()
        num_generated = int(stack.status()["num_generated_tokens"])

        for number in range(NUM_WAVES):
            await wave(stack, NUM_WARM_UP_WAVES + number)
        stack.wait_until_nothing_is_held()
        num_generated = int(stack.status()["num_generated_tokens"]) - num_generated
        after = await generate(stub, request(PROMPTS[3], 20))

    # Most answers were aborted long before their last token.
    assert num_generated < NUM_WAVES * WAVE * NUM_TOKENS / 10
    assert after.token_ids == before.token_ids
    for service, size in stack.resident_bytes().items():
        assert size - memory[service] < MOST_GROWTH_BYTES, service
