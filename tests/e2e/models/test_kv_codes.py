"""With 8-bit keys and values the answers of two ranks do not depend on caching, batching or a
worker's death.
"""

import re
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack
from tests.plain_http import http_get

NUM_TOKENS = 100
HIT_AT = 20


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel) -> Iterator[Stack]:
    flags = ("--kv-cache-memory-bytes", "400000", "--max-model-len", "512")
    codes = ("--kv-cache-dtype", "int8_per_token_head", "--tensor-parallel-size", "2")
    stack = Stack(tiny_model.directory, *flags, *codes)
    yield stack
    stack.close()


async def answers(stack: Stack, *prompts: list[int], victim: str | None = None) -> list[list[int]]:
    """Greedy answers. The victim is killed when the first answer has begun."""
    requests = [request(prompt, NUM_TOKENS) for prompt in prompts]
    hit = None if victim is None else partial(stack.hit, victim, signal.SIGKILL)
    found: list[Answer] = await generate_all(stack.grpc, requests, hit, HIT_AT)
    return [answer.token_ids for answer in found]


async def test_tokens_are_the_same_however_they_are_served(stack: Stack) -> None:
    prompts = PROMPTS[:4]
    together = await answers(stack, *prompts)
    assert all(len(answer) == NUM_TOKENS for answer in together)
    for prompt, expected in zip(prompts, together, strict=True):  # alone, after prefix hits
        assert await answers(stack, prompt) == [expected]
    victim = max(name for name in stack.pids() if name.startswith("worker"))
    pid = stack.pids()[victim]
    assert await answers(stack, *prompts, victim=victim) == together
    stack.wait_until_back(victim, pid)
    assert await answers(stack, *prompts) == together
    text = http_get(f"{stack.url}/metrics").text
    assert re.search(r'^vllm:cache_config_info{.*cache_dtype="int8_per_token_head"', text, re.M)
