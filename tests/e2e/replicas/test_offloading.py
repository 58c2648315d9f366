"""With two pipeline stages, offloaded keys and values survive a reset of the prefix cache, but not
the end of the worker. tests/e2e/models/test_kv_codes.py tests the same with two ranks.
"""

import re
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import generate_all, greedy_answers, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.plain_http import http_get, http_post

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel) -> Iterator[Stack]:
    """All services, with a small KV cache and a host-memory tier for all offloaded blocks."""
    flags = ("--num-blocks", "60", "--max-model-len", "512", "--kv-offloading-size", "0.02")
    stages = ("--pipeline-parallel-size", "2")
    stack = Stack(tiny_model.directory, "--admin-port", "0", *flags, *stages)
    yield stack
    stack.close()


def num_loaded(stack: Stack) -> float:
    """The number of blocks that were loaded from the host-memory tier, according to the metrics."""
    text = http_get(f"{stack.url}/metrics").text
    (value,) = re.findall(r'^stepwell_kv_tier_transfers_total{.*"loaded".*} (\S+)$', text, re.M)
    return float(value)


async def test_tokens_are_the_same_from_the_tier_and_after_the_loss_of_a_worker(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prompts = PROMPTS[:4]
    expected = [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in prompts]
    assert await greedy_answers(stack, prompts, NUM_TOKENS) == expected
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    again = await generate_all(stack.grpc, [request(prompt, NUM_TOKENS) for prompt in prompts])
    assert [answer.token_ids for answer in again] == expected
    assert all(
        answer.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
        for answer, prompt in zip(again, prompts, strict=True)
    )
    loaded = num_loaded(stack)
    assert loaded >= 5

    before = stack.pids()
    victim = sorted(name for name in before if name.startswith("worker"))[-1]
    assert await greedy_answers(stack, prompts, NUM_TOKENS, victim) == expected
    wait_for(lambda: stack.healthy() and stack.pids().get(victim, before[victim]) != before[victim])

    # The killed worker's tier is lost. The new worker fills and reads a new one.
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    assert await greedy_answers(stack, prompts, NUM_TOKENS) == expected
    assert num_loaded(stack) > loaded
    stack.wait_until_nothing_is_held()
