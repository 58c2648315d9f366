"""Drafts from suffix trees do not change the answers of two ranks, even if a rank is killed. They
come only from answers with the same cache salt.
"""

import re
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import greedy_answers
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.plain_http import http_get, http_post

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel) -> Iterator[Stack]:
    flags = ("--num-blocks", "60", "--max-model-len", "512", "--tensor-parallel-size", "2")
    # With at most five drafts a step, even an expected answer takes long enough to kill a worker.
    speculation = '{"method": "suffix", "num_speculative_tokens": 5, "num_rows": 0}'
    stack = Stack(tiny_model.directory, *flags, "--speculative-config", speculation)
    yield stack
    stack.close()


def num_accepted(stack: Stack) -> float:
    pattern = r"^vllm:spec_decode_num_accepted_tokens_total\{[^}]*\} (\S+)$"
    return sum(map(float, re.findall(pattern, http_get(f"{stack.url}/metrics").text, re.M)))


def test_answers_of_another_salt_serve_no_drafts(stack: Stack) -> None:
    body = {"model": stack.model, "prompt": "one two three four", "temperature": 0}
    stood, texts = [], set()
    for salt in ("ann", "ben", "ann"):
        before = num_accepted(stack)
        changes = {"cache_salt": salt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = http_post(f"{stack.url}/v1/completions", json=body | changes, timeout=60)
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["text"])
        stood.append(num_accepted(stack) - before)
    assert len(texts) == 1
    first, other, again = stood
    assert other < first + NUM_TOKENS / 6
    assert again > first + NUM_TOKENS / 3


async def test_tokens_are_the_models_own(stack: Stack, tiny_model: TinyModel) -> None:
    num_tokens = 2 * NUM_TOKENS
    expected = [greedy(tiny_model.model, prompt, num_tokens) for prompt in PROMPTS[:4]]
    victim = max(name for name in stack.pids() if name.startswith("worker"))
    pid = stack.pids()[victim]
    # A worker process that starts late has no trees of these answers before another round.
    for killed in (None, None, victim, None, None):
        before = num_accepted(stack)
        assert await greedy_answers(stack, PROMPTS[:4], num_tokens, killed) == expected
        if killed is not None:
            stack.wait_until_back(victim, pid)
    # The gateway's metrics may lack a replica whose scheduler answers too slowly.
    wait_for(lambda: num_accepted(stack) > before)
