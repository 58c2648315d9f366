"""Offloaded keys and values survive a reset of the cache, but not the end of the worker. This holds
with two ranks and with two stages.
"""

import re
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.plain_http import http_get, http_post

NUM_TOKENS = 100
HIT_AT = 20


@pytest.fixture(
    scope="module",
    params=["--tensor-parallel-size", "--pipeline-parallel-size"],
    ids=["two ranks", "two stages"],
)
def stack(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Stack]:
    """A stack with a small cache, and a tier with room for everything."""
    flags = ("--num-blocks", "60", "--max-model-len", "512", "--kv-offloading-size", "0.02")
    stack = Stack(tiny_model.directory, "--admin-port", "0", *flags, request.param, "2")
    yield stack
    stack.close()


async def answers(stack: Stack, victim: str | None = None) -> list[Answer]:
    """Four greedy answers. The victim is killed when the first answer has begun."""
    requests = [request(prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
    hit = None if victim is None else partial(stack.hit, victim, signal.SIGKILL)
    return await generate_all(stack.grpc, requests, hit, HIT_AT)


def num_loaded(stack: Stack) -> float:
    """The number of blocks that were loaded from the tier, according to the metrics."""
    text = http_get(f"{stack.url}/metrics").text
    (value,) = re.findall(r'^stepwell_kv_tier_transfers_total{.*"loaded".*} (\S+)$', text, re.M)
    return float(value)


async def test_tokens_are_the_same_from_the_tier_and_after_the_loss_of_a_worker(
    stack: Stack, tiny_model: TinyModel
) -> None:
    expected = [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
    assert [answer.token_ids for answer in await answers(stack)] == expected
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    again = await answers(stack)
    assert [answer.token_ids for answer in again] == expected
    assert all(
        answer.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
        for answer, prompt in zip(again, PROMPTS[:4], strict=True)
    )
    loaded = num_loaded(stack)
    assert loaded >= 5

    before = stack.pids()
    victim = sorted(name for name in before if name.startswith("worker"))[-1]
    assert [answer.token_ids for answer in await answers(stack, victim)] == expected
    wait_for(lambda: stack.healthy() and stack.pids().get(victim, before[victim]) != before[victim])

    # The tier was lost with the worker, and is filled and read again.
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    assert [answer.token_ids for answer in await answers(stack)] == expected
    assert num_loaded(stack) > loaded
    stack.wait_until_nothing_is_held()
