"""A draft model does not change the answers of two ranks, even if a worker is killed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import greedy_answers
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.parity.draft_models import save_perturbed
from tests.plain_http import http_get

NUM_TOKENS = 100
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def draft(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_perturbed(tiny_model.directory, tmp_path_factory.mktemp("draft") / "perturbed")


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel, draft: Path) -> Iterator[Stack]:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    flags = ("--num-blocks", "60", "--max-model-len", "512", "--tensor-parallel-size", "2")
    stack = Stack(tiny_model.directory, *flags, "--speculative-config", json.dumps(config))
    yield stack
    stack.close()


def count(stack: Stack, name: str) -> float:
    """The current value of a counter of drafts, according to the gateway's metrics."""
    pattern = rf"^vllm:spec_decode_{name}_total{{(?![^}}]*position)[^}}]*}} (\S+)$"
    return sum(map(float, re.findall(pattern, http_get(f"{stack.url}/metrics").text, re.M)))


async def test_tokens_are_the_models_own(stack: Stack, tiny_model: TinyModel) -> None:
    prompts = PROMPTS[:4]
    expected = [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in prompts]
    for _ in range(2):  # the second round has prefix hits
        assert await greedy_answers(stack, prompts, NUM_TOKENS) == expected
    drafted, accepted = count(stack, "num_draft_tokens"), count(stack, "num_accepted_tokens")
    assert 0.2 * drafted < accepted < drafted
    victim = max(name for name in stack.pids() if name.startswith("worker"))
    pid = stack.pids()[victim]
    assert await greedy_answers(stack, prompts, NUM_TOKENS, victim) == expected
    stack.wait_until_back(victim, pid)
    assert await greedy_answers(stack, prompts, NUM_TOKENS) == expected
    wait_for(lambda: count(stack, "num_accepted_tokens") > accepted)
