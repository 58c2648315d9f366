"""What a live replica decided, with two steps in flight, is decided again from its log."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from stepwell.scheduler.v1 import scheduler_pb2

from services.scheduler.core.config import Policy
from tests.cli.replaying import live_log, replay
from tests.scheduler.serving_replica import Gateway, Replica


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def calls(path: Path) -> set[str]:
    return {entry["call"] for entry in entries(path)[1:]}


async def give_up_on_some(replica: Replica, gateway: Gateway) -> None:  # noqa: ARG001
    await gateway.until_tokens(0, 2)
    await gateway.abort(1, 5, 23)
    await gateway.until_tokens(4, 3)
    await gateway.abort(4, 22)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["two in flight", "one in flight"])
async def test_a_run_under_load_is_reproduced_bit_for_bit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    async_scheduling: bool,
) -> None:
    path = await live_log(
        tmp_path / "steps.jsonl",
        give_up_on_some,
        policy=Policy(policy),
        async_scheduling=async_scheduling,
    )
    told = entries(path)
    assert sum(len(entry.get("preemptions", ())) for entry in told) > 5
    assert sum(entry.get("call") == "abort" for entry in told) > 2
    assert await asyncio.to_thread(replay, path) == 0
    assert capsys.readouterr().out.endswith("0 differences\n")
