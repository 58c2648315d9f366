"""All four services with the policy `program`, and agents whose contexts exceed the pool."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_post
from tests.tiny_models import VOCAB_SIZE
from tests.worker.options.simulated.oracle import Oracle

PROFILE = "kv_cache_memory_bytes = 1_500_000\n[mixed]\nseconds = 0.01\nseconds_per_token = 2e-4\n"
NUM_PROGRAMS, NUM_TURNS = 8, 4
ORACLE = Oracle(VOCAB_SIZE, (2,))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("programs")
    save_servable_model(directory)
    (directory / "model.safetensors").unlink()
    (directory / "steps.toml").write_text(PROFILE)
    flags = ("--device", "simulated", "--profile", "steps.toml", "--policy", "program")
    flags += ("--num-blocks", "41", "--max-num-seqs", "4")
    with closing(Stack(directory, *flags, directory=directory)) as running:
        yield running


def run_program(stack: Stack, number: int) -> int:
    """Sends the turns of a program. Returns the number of its cached tokens."""
    context, num_cached = [7 + (number * 31 + place) % 90 for place in range(60)], 0
    for turn in range(NUM_TURNS):
        body = {"prompt": context, "max_tokens": 12, "return_token_ids": True}
        answer = http_post(f"{stack.url}/v1/completions", json=body).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == ORACLE.continuation(context, 12)
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"] if turn else 0
        context += [*choice["token_ids"], *range(20, 28)]
        time.sleep(0.05)
    return num_cached


def test_agents_get_their_answers_and_find_their_contexts(stack: Stack) -> None:
    with ThreadPoolExecutor(NUM_PROGRAMS) as pool:
        cached = list(pool.map(lambda number: run_program(stack, number), range(NUM_PROGRAMS)))
    # At most 64 + 80 + 96 tokens in whole blocks of the last three prompts of each.
    assert sum(cached) > 0.5 * NUM_PROGRAMS * 240
    stack.wait_until_nothing_is_held()
