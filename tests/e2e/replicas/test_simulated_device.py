"""All four services with a simulated device."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_get, http_post
from tests.tiny_models import VOCAB_SIZE
from tests.worker.options.simulated.oracle import Oracle

STEP_SECONDS = 0.03
PROFILE = f"""
kv_cache_memory_bytes = 1_500_000

[mixed]
seconds = {STEP_SECONDS}
"""
ORACLE = Oracle(VOCAB_SIZE, (2,))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Services of a model without weights. Every step takes 30 ms."""
    directory: Path = tmp_path_factory.mktemp("simulated")
    save_servable_model(directory)
    (directory / "model.safetensors").unlink()
    profile = directory / "steps.toml"
    profile.write_text(PROFILE)
    flags = ("--device", "simulated", "--profile", str(profile), "--max-num-seqs", "4")
    with closing(Stack(directory, *flags)) as stack:
        yield stack


def test_a_chat_is_answered_with_the_tokens_of_the_simulated_model(simulated: Stack) -> None:
    """The second turn begins with blocks of the first one."""
    messages = [{"role": "user", "content": "What does it cost to simulate a worker?"}]
    for _ in range(2):
        answer = http_post(
            f"{simulated.url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 12, "return_token_ids": True},
        ).json()
        (choice,) = answer["choices"]
        expected = ORACLE.continuation(answer["prompt_token_ids"], 12)
        assert choice["token_ids"] == expected
        assert choice["finish_reason"] == "length"
        messages += [choice["message"], {"role": "user", "content": "And twice?"}]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def step_seconds(stack: Stack) -> float:
    """The time of all steps so far, as the worker reports it."""
    text = http_get(f"{stack.url}/metrics").text
    (total,) = re.findall(r"^stepwell_worker_step_seconds_sum{.*?} (\S+)$", text, re.M)
    return float(total)


def test_the_metrics_show_the_times_of_the_profile(simulated: Stack) -> None:
    """Ten tokens take ten steps. With two steps in flight, one more step may begin."""
    before = step_seconds(simulated)
    http_post(f"{simulated.url}/v1/completions", json={"prompt": "time", "max_tokens": 10})
    simulated.wait_until_nothing_is_held()
    took = step_seconds(simulated) - before
    assert 10 * STEP_SECONDS <= took < 12 * STEP_SECONDS
