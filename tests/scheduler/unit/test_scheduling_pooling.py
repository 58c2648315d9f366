"""Requests of a pooling model, which end when their prompts are computed."""

from typing import Any

import pytest

from tests.scenarios.run import run_scenario
from tests.scenarios.scenario import read_scenario


async def run(prompts: dict[str, int], **config: Any) -> dict[str, Any]:
    """Runs a scenario in which prompts of these lengths, without common tokens, arrive before step
    0. Returns its record.
    """
    events = [
        {
            "step": 0,
            "add": {
                "request_id": name,
                "prompt_token_ids": [1000 * index + token for token in range(count)],
                "max_tokens": 1,
            },
        }
        for index, (name, count) in enumerate(prompts.items(), start=1)
    ]
    limits = {"block_size": 4, "max_model_len": 16, "max_num_batched_tokens": 8, "pooling": True}
    return await run_scenario(read_scenario({"config": limits | config, "events": events}))


def granted(record: dict[str, Any]) -> list[list[list[Any]]]:
    return [step["scheduled"] for step in record["steps"] if "scheduled" in step]


@pytest.mark.parametrize("is_async", [False, True])
async def test_each_token_of_a_prompt_is_computed_once(is_async: bool) -> None:
    record = await run({"a": 10, "b": 3}, async_scheduling=is_async)
    assert granted(record) == [[["a", 8]], [["a", 2], ["b", 3]]]
    ends = {name: end["finish_reason"] for name, end in record["requests"].items()}
    assert (record["status"], ends) == ("done", {"a": "stop", "b": "stop"})


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_prompt_may_be_as_long_as_the_model(is_async: bool) -> None:
    record = await run({"a": 16, "b": 17}, async_scheduling=is_async)
    assert granted(record) == [[["a", 8]], [["a", 8]]]
    assert record["requests"]["a"]["finish_reason"] == "stop"
    assert record["requests"]["b"]["finish_reason"] == "rejected"


async def test_a_preempted_prompt_is_computed_again() -> None:
    config: dict[str, Any] = {"num_gpu_blocks": 6, "scheduler_reserve_full_isl": False}
    config |= {"long_prefill_token_threshold": 4, "enable_prefix_caching": False}
    record = await run({"a": 16, "b": 12}, **config)
    together = [["a", 4], ["b", 4]]
    assert granted(record)[:3] == [together, together, [["a", 4]]]
    assert record["requests"]["b"]["num_preemptions"] == 1
    b = [count for step in granted(record)[3:] for name, count in step if name == "b"]
    assert (sum(b), record["requests"]["b"]["finish_reason"]) == (12, "stop")
