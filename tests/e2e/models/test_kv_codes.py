"""With an 8-bit KV cache, answers do not depend on prefix hits, offloading, batches or kills."""

import re
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import greedy_answers
from tests.e2e.prompts import PROMPTS
from tests.e2e.replicas.test_pipeline_parallel import num_loaded
from tests.e2e.stack import Stack
from tests.plain_http import http_get, http_post

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel) -> Iterator[Stack]:
    flags = ("--kv-cache-memory-bytes", "400000", "--max-model-len", "512")
    codes = ("--kv-cache-dtype", "int8_per_token_head", "--tensor-parallel-size", "2")
    tier = ("--kv-offloading-size", "0.02", "--admin-port", "0")
    stack = Stack(tiny_model.directory, *flags, *codes, *tier)
    yield stack
    stack.close()


async def answers_after_a_reset(stack: Stack, *prompts: list[int]) -> list[list[int]]:
    """Answers after a reset of the prefix cache, so that the prompts' blocks are found only in the
    tier of host memory.
    """
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    return await greedy_answers(stack, prompts, NUM_TOKENS)


async def test_tokens_are_the_same_however_they_are_served(stack: Stack) -> None:
    prompts = PROMPTS[:4]
    together = await greedy_answers(stack, prompts, NUM_TOKENS)
    assert all(len(answer) == NUM_TOKENS for answer in together)
    for prompt, expected in zip(prompts, together, strict=True):  # alone, with prefix hits
        assert await greedy_answers(stack, [prompt], NUM_TOKENS) == [expected]
    assert await answers_after_a_reset(stack, *prompts) == together
    loaded = num_loaded(stack)
    assert loaded >= 5
    victim = max(name for name in stack.pids() if name.startswith("worker"))
    pid = stack.pids()[victim]
    assert await greedy_answers(stack, prompts, NUM_TOKENS, victim) == together
    stack.wait_until_back(victim, pid)
    # The killed worker's tier is lost. The new worker fills and reads a new one.
    assert await greedy_answers(stack, prompts, NUM_TOKENS) == together
    assert await answers_after_a_reset(stack, *prompts) == together
    assert num_loaded(stack) > loaded
    text = http_get(f"{stack.url}/metrics").text
    assert re.search(r'^vllm:cache_config_info{.*cache_dtype="int8_per_token_head"', text, re.M)
