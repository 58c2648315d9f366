"""`stepwell up --replicas 2` serves with both replicas. A killed scheduler restarts."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.worker.backends.choices import SumOrder
from services.worker.backends.native.compiled import processor_features
from tests.e2e.conftest import TinyModel
from tests.e2e.stack import Stack, stepwell, wait_for
from tests.hub_cache import in_hub_cache
from tests.plain_http import http_get, http_post

SERVICES = {
    "gateway",
    *("scheduler-0", "kvpool-0", "worker-0"),
    *("scheduler-1", "kvpool-1", "worker-1"),
}


NAME = "Owner/Tiny-0.5B"


@pytest.fixture(scope="module")
def two(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--replicas", "2", "--routing-policy", "round-robin", "--num-blocks", "200")
    flags += ("--admin-port", "0")
    environ = in_hub_cache(tmp_path_factory.mktemp("hub"), NAME, tiny_model.directory)
    stack = Stack(Path(NAME), *flags, environ=environ)
    yield stack
    stack.close()


def test_a_model_of_the_hubs_cache_is_served_by_its_name(two: Stack) -> None:
    (served,) = http_get(f"{two.url}/v1/models").json()["data"]
    assert (two.model, served["id"]) == (NAME, NAME)


def ask(stack: Stack, prompt: str) -> dict[str, Any]:
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = http_post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def complete(stack: Stack) -> str:
    return str(ask(stack, "one two")["choices"][0]["text"])


def operate(stack: Stack, call: str, **query: str) -> dict[str, Any]:
    answer = http_post(f"{stack.admin_url}{call}", params=query, timeout=60)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def replicas(stack: Stack) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = http_get(f"{stack.url}/status").json()["replicas"]
    return listed


def both_ready(stack: Stack) -> bool:
    return [replica["ready"] for replica in replicas(stack)] == [True, True]


def shown_by_status(stack: Stack) -> list[str]:
    """The lines of `stepwell status` that name a replica."""
    shown = stepwell("status", "--url", stack.url)
    return [line for line in shown.splitlines() if line.startswith("replica ")]


def test_two_replicas_answer_and_heal(two: Stack) -> None:
    wait_for(lambda: both_ready(two))
    pids = two.pids()
    assert set(pids) == SERVICES
    assert {line.partition("|")[0].rstrip() for line in two.output if " | " in line} == {
        "up",
        *SERVICES,
    }
    assert sum(", shared by 2 workers)" in line for line in two.output) == 2
    text = complete(two)
    assert complete(two) == text
    # Requests are routed to the replicas in rotation, so each has served one.
    wait_for(lambda: [r["stats"]["num_finished"] for r in replicas(two)] == [1, 1])
    (kernels,) = {replica["stats"]["kernels"] for replica in replicas(two)}
    order = SumOrder(kernels.removeprefix("native, bfloat16 in the order of "))
    assert order is not SumOrder.TILES or "amx_tile" in processor_features()
    metrics = http_get(f"{two.url}/metrics").text
    assert (
        len(re.findall(rf'^stepwell_worker_kernels_info{{.*="{kernels}".*}} 1', metrics, re.M)) == 2
    )
    first, second = shown_by_status(two)
    assert first.endswith("/scheduler-0.sock: idle")
    assert second.endswith("/scheduler-1.sock: idle")

    two.hit("scheduler-0")
    assert complete(two) == text
    two.wait_until_back("scheduler-0", pids["scheduler-0"])
    wait_for(lambda: both_ready(two))

    assert [complete(two) for _ in range(2)] == [text] * 2
    after = two.pids()
    assert after["scheduler-0"] != pids["scheduler-0"]
    assert {name: after[name] for name in SERVICES - {"scheduler-0"}} == {
        name: pids[name] for name in SERVICES - {"scheduler-0"}
    }


def num_finished(stack: Stack) -> list[int]:
    return [replica["stats"]["num_finished"] for replica in replicas(stack)]


def test_operators_calls_change_both_replicas(two: Stack) -> None:
    wait_for(lambda: both_ready(two))
    text = complete(two)
    assert len(operate(two, "/pause", mode="keep")["replicas"]) == 2
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(complete, two)
        wait_for(lambda: sum(r["stats"]["num_waiting"] for r in replicas(two)) == 1)
        assert http_get(f"{two.admin_url}/is_paused").json()["is_paused"]
        assert not asked.done()
        operate(two, "/resume")
        assert asked.result(timeout=60) == text


def test_a_reset_cache_has_nothing(two: Stack) -> None:
    prompt = "the same words again and again, " * 4

    def num_cached() -> list[int]:
        usages = [ask(two, prompt)["usage"] for _ in range(2)]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]

    num_cached()
    assert min(num_cached()) > 0
    operate(two, "/reset_prefix_cache")
    assert num_cached() == [0, 0]


def test_a_drained_replica_gets_nothing_until_it_is_undrained(two: Stack) -> None:
    first = replicas(two)[0]["address"]
    drained = stepwell("admin", "--url", two.admin_url, "drain", "--replica", first)
    assert drained == f"{first}: draining, 0 requests left\n"
    wait_for(lambda: [replica["ready"] for replica in replicas(two)] == [False, True])
    before = num_finished(two)
    for _ in range(3):
        complete(two)
    wait_for(lambda: num_finished(two) == [before[0], before[1] + 3])
    operate(two, "/undrain", replica=first)
    wait_for(lambda: both_ready(two))
    for _ in range(2):
        complete(two)
    wait_for(lambda: num_finished(two) == [before[0] + 1, before[1] + 4])
