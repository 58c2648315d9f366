"""`stepwell top` and `stepwell trace` against all four services."""

import re
import secrets

from tests.e2e.stack import Stack, wait_for
from tests.e2e.test_command_line import stepwell
from tests.plain_http import http_get, http_post


def test_top_shows_the_replica_in_one_screen(stack: Stack) -> None:
    lines = stepwell(stack, "top", "--once", "--interval-seconds", "0.2", "--width", "70").split(
        "\n"
    )
    assert lines[0].startswith(f"{stack.model}  ")
    assert any(line.startswith("replica unix:") for line in lines)
    labels = [line.split()[0] for line in lines[3:11]]
    assert labels == [
        *("running", "waiting", "budget", "pool"),
        *("steps", "tokens", "hit", "preempted"),
    ]
    assert max(map(len, lines)) <= 70


def test_a_traced_request_is_shown_through_all_services(stack: Stack) -> None:
    """The client's own trace context has it sampled, however many requests the minute had."""
    trace_id = secrets.token_hex(16)
    answer = http_post(
        f"{stack.url}/v1/completions",
        json={"prompt": "where does the time go?", "max_tokens": 5, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    name = answer.json()["id"]
    assert name in stepwell(stack, "trace", "--limit", "5")

    def services() -> set[str]:
        trace = http_get(f"{stack.url}/traces/{trace_id}").json()
        return {span["service"].removeprefix("stepwell-") for span in trace["spans"]}

    wait_for(lambda: services() == {"gateway", "scheduler", "kvpool"}, 30)
    lines = stepwell(stack, "trace", name, "--width", "90").split("\n")
    assert lines[0].startswith(name)
    assert len([line for line in lines if re.search(r"[█▏].* \d.* (s|ms|µs)$", line)]) >= 4
    assert max(map(len, lines)) <= 90


def test_a_trace_that_is_not_kept_is_one_sentence(stack: Stack) -> None:
    answer = http_get(f"{stack.url}/traces/cmpl-nothing")
    assert answer.status_code == 404
    assert "no trace of 'cmpl-nothing' is kept" in answer.json()["error"]["message"]
