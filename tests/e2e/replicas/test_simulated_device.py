"""All four services with a simulated device and the scheduling policy of docs/simulation.md."""

import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.stack import ROOT, Stack, stepwell
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_get, http_post
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import wait_for
from tests.worker.options.simulated.oracle import Oracle

STEP_SECONDS = 0.03
PROFILE = f"""
kv_cache_memory_bytes = 1_500_000

[mixed]
seconds = {STEP_SECONDS}
"""
ORACLE = Oracle(VOCAB_SIZE, (2,))


POLICY = "shortest:ShortestPromptFirst"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, a profile of 30 ms a step, and the policy of docs/simulation.md."""
    directory: Path = tmp_path_factory.mktemp("simulated")
    save_servable_model(directory)
    (directory / "model.safetensors").unlink()
    (directory / "steps.toml").write_text(PROFILE)
    page = (ROOT / "docs" / "simulation.md").read_text()
    (code,) = re.findall(r"Write `shortest\.py`:\n\n(.*?)\n\nCheck it\.", page, re.S)
    (directory / "shortest.py").write_text(textwrap.dedent(code) + "\n")
    return directory


@pytest.fixture(scope="module")
def simulated(directory: Path) -> Iterator[Stack]:
    flags = ("--device", "simulated", "--profile", "steps.toml", "--max-num-seqs", "4")
    environ = {"STEPWELL_SCHEDULER_STEP_LOG": "steps.jsonl"}
    flags += ("--policy", POLICY)
    with closing(Stack(directory, *flags, environ=environ, directory=directory)) as stack:
        yield stack


def test_a_chat_is_answered_with_the_tokens_of_the_simulated_model(simulated: Stack) -> None:
    """The second turn has a prefix hit with blocks of the first turn."""
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
    """The total time of all steps so far, from the worker's metrics."""
    text = http_get(f"{stack.url}/metrics").text
    (total,) = re.findall(r"^stepwell_worker_step_seconds_sum{.*?} (\S+)$", text, re.M)
    return float(total)


def test_the_metrics_show_the_times_of_the_profile(simulated: Stack) -> None:
    """Ten tokens take ten steps. An eleventh step may have begun, because two are in flight."""
    before = step_seconds(simulated)
    http_post(f"{simulated.url}/v1/completions", json={"prompt": "time", "max_tokens": 10})
    simulated.wait_until_nothing_is_held()
    took = step_seconds(simulated) - before
    assert 10 * STEP_SECONDS <= took < 12 * STEP_SECONDS


def test_the_policy_of_the_page_lets_a_short_prompt_overtake(
    simulated: Stack, directory: Path
) -> None:
    """Four requests run, of which one ends early, while a long and a short prompt wait."""
    answered: list[str] = []

    def ask(prompt: str, max_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        assert http_post(f"{simulated.url}/v1/completions", json=body).status_code == 200
        answered.append(prompt)

    def waiting(count: int) -> bool:
        return bool(simulated.status()["num_waiting"] == count)

    with ThreadPoolExecutor() as pool:
        asked: list[Future[None]] = [
            pool.submit(ask, f"running {number}", 150 if number else 90) for number in range(4)
        ]
        wait_for(lambda: simulated.status()["num_running"] == 4)
        for count, prompt in enumerate(("a prompt that is long", "short"), start=1):
            asked.append(pool.submit(ask, prompt, 10))
            wait_for(lambda count=count: waiting(count))
        for one in asked:
            one.result()
    assert answered[:3] == ["running 0", "short", "a prompt that is long"]
    wait_for(lambda: "0 differences" in replayed(directory))
    assert "what if" in replayed(directory)


def replayed(directory: Path) -> str:
    """Runs `stepwell replay` on the server's step log with the same policy. Returns the output."""
    return stepwell("replay", "steps.jsonl", "--set", f"policy={POLICY}", directory=directory)


def test_the_policy_of_the_page_passes_the_kit_and_is_simulated(directory: Path) -> None:
    check = ("--check-policy", POLICY, "--programs", "12")
    said = stepwell("simulate", *check, directory=directory)
    assert said == f"{POLICY}: 12 worlds, no problem\n"
    crowd = ("--workload", "chat", "--programs", "100", "--rate", "20", "--max-num-seqs", "64")
    policies = ("--policy", "fcfs", "--policy", POLICY)
    said = stepwell("simulate", *crowd, *policies, directory=directory)
    assert len(re.findall(rf"^{POLICY} ", said, re.M)) == 5
