"""The output of `stepwell top` for the gateway's /activity."""

from typing import Any

import pytest

from services.cli.views.samples import Sample
from services.cli.views.top_view import screen
from tests.cli.unit.test_fleet_view import STATS


def request(number: int, **given: Any) -> dict[str, Any]:
    fields = {
        "request_id": f"cmpl-{number}",
        "state": "running",
        "wait_reason": None,
        "seconds": 1.25,
        "num_prompt_tokens": 100,
        "num_output_tokens": 5,
        "num_computed_tokens": 104,
        "num_cached_tokens": 64,
    }
    return fields | given


def step(prefill: int, decode: int) -> dict[str, Any]:
    return {"num_prefill_tokens": prefill, "num_decode_tokens": decode}


def look(seconds: float = 1.0, **given: Any) -> Sample:
    replica = {
        "address": "a:1",
        "ready": True,
        "reason": "",
        "stats": STATS | {"max_num_batched_tokens": 512},
        "requests": [],
        "steps": [step(100, 8), step(20, 8)],
        "blocks": {"num_cached": 30},
        "programs": [],
    } | given
    activity = {
        "model": "demo",
        "requests_in_flight": 5,
        "queued": [],
        "draining": False,
        "replicas": [replica],
    }
    return Sample(activity, seconds)


def text(
    looked: Sample, before: Sample | None = None, width: int = 80, height: int = 40
) -> list[str]:
    return [line.plain.rstrip() for line in screen(looked, before, width, height)]


def test_a_replica_on_a_narrow_screen() -> None:
    assert text(look(), width=60) == [
        "demo  5 requests at the gateway",
        "",
        "replica a:1  running",
        "  running   █░░░░░░░░░░░░░░ 3 of 64",
        "  waiting   2 for blocks",
        "  budget    ██░░░░░░░░░░░░░ 60 prefill + 8 decode of 512",
        "  pool      ████░░░░░░░░░░░ 50 of 200 held, 30 cached",
        "  steps     -, 2.50 ms each",
        "  tokens    - generated, - of prompts",
        "  hit rate  25.0 % of prompt tokens",
        "  preempted 7, 300 tokens given up",
    ]


def test_on_a_wide_screen_rows_stand_beside_each_other() -> None:
    lines = text(look(), width=120)
    assert "3 of 64" in lines[3]
    assert "2.50 ms each" in lines[3]
    assert len(lines) == 7


def test_two_looks_give_rates() -> None:
    later = look(seconds=3.0, stats=look().answer["replicas"][0]["stats"] | {"num_steps": 240})
    lines = text(later, look(seconds=1.0))
    assert "  steps     100/s, 2.50 ms each" in lines


def test_requests_that_wait_say_for_what() -> None:
    waiting = request(2, state="waiting", wait_reason="no_blocks", num_computed_tokens=0)
    lines = text(look(requests=[request(1), waiting]), width=120)
    assert lines[-2].split() == ["cmpl-1", "running", "104/105", "5", "64", "1.25", "s"]
    assert lines[-1].split()[-2:] == ["s", "blocks"]


def test_where_there_are_many_requests_both_kinds_are_shown() -> None:
    running = [request(number) for number in range(100)]
    waiting = [request(number, state="waiting") for number in range(100, 200)]
    lines = text(look(requests=[*running, *waiting]), height=30)
    assert len(lines) <= 30
    assert sum("running" in line for line in lines[12:]) >= 5
    assert sum("waiting" in line for line in lines[12:]) >= 5
    assert lines[-1].startswith("  and 1")


def test_programs_in_a_pause_are_a_line() -> None:
    programs = [
        {"program": name, "tool": tool, "seconds": 0.25, "num_blocks": 40}
        for name, tool in (("job-17", "grep"), ("", ""))
    ]
    assert text(look(programs=programs), width=140)[-1] == (
        "  2 programs pause with 80 blocks: job-17 (grep, 250 ms, 40 blocks), "
        "(another tenant's) (no tool, 250 ms, 40 blocks)"
    )


def test_a_replica_that_does_not_answer_says_why() -> None:
    lines = text(look(ready=False, reason="UNAVAILABLE: away", stats=None, requests=[]))
    assert lines[2:] == ["replica a:1  UNAVAILABLE: away"]


@pytest.mark.parametrize("width", [20, 40, 72, 96, 200])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    requests = [request(1, request_id="cmpl-" + "x" * 100), request(2)]
    assert max(map(len, text(look(requests=requests), width=width))) <= width
