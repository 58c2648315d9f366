"""`stepwell up --replicas 2`: both replicas serve, and one whose scheduler is killed comes back."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.stack import ROOT, Stack, wait_for
from tests.plain_http import http_get, http_post

SERVICES = {
    "gateway",
    *("scheduler-0", "kvpool-0", "worker-0"),
    *("scheduler-1", "kvpool-1", "worker-1"),
}


@pytest.fixture
def two(tiny_model: TinyModel) -> Iterator[Stack]:
    flags = ("--replicas", "2", "--routing-policy", "round-robin", "--num-blocks", "200")
    stack = Stack(tiny_model.directory, *flags)
    yield stack
    stack.close()


def complete(stack: Stack) -> str:
    body = {"model": stack.model, "prompt": "one two", "max_tokens": 8, "temperature": 0}
    answer = http_post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def replicas(stack: Stack) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = http_get(f"{stack.url}/status").json()["replicas"]
    return listed


def both_ready(stack: Stack) -> bool:
    return [replica["ready"] for replica in replicas(stack)] == [True, True]


def shown_by_status(stack: Stack) -> list[str]:
    """The lines of `stepwell status` that name a replica."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "status", "--url", stack.url],
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=60,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("replica ")]


def test_two_replicas_answer_and_heal(two: Stack) -> None:
    wait_for(lambda: both_ready(two), 10)
    pids = two.pids()
    assert set(pids) == SERVICES
    assert {line.partition("|")[0].rstrip() for line in two.output if " | " in line} == {
        "up",
        *SERVICES,
    }
    assert sum(", shared by 2 workers)" in line for line in two.output) == 2
    text = complete(two)
    assert complete(two) == text
    # By turns: each replica has served one.
    wait_for(lambda: [r["stats"]["num_finished"] for r in replicas(two)] == [1, 1], 10)
    first, second = shown_by_status(two)
    assert first.endswith("/scheduler-0.sock: ready")
    assert second.endswith("/scheduler-1.sock: ready")

    two.hit("scheduler-0")
    assert complete(two) == text
    two.wait_until_back("scheduler-0", pids["scheduler-0"])
    wait_for(lambda: both_ready(two), 30)

    assert [complete(two) for _ in range(2)] == [text] * 2
    after = two.pids()
    assert after["scheduler-0"] != pids["scheduler-0"]
    assert {name: after[name] for name in SERVICES - {"scheduler-0"}} == {
        name: pids[name] for name in SERVICES - {"scheduler-0"}
    }
