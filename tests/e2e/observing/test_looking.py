"""Runs `stepwell top`, `trace` and the streams of `deploy check` against all services."""

import re
import secrets
import signal
import time
from collections.abc import Callable
from importlib.metadata import version

from services.cli.deploy.fleet import GatewayFleet
from tests.e2e.clients.test_command_line import stepwell
from tests.e2e.stack import SERVICES, Stack, wait_for
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


def test_the_overview_has_every_process(stack: Stack) -> None:
    processes = http_get(f"{stack.url}/activity/overview").json()["processes"]
    assert [one["service"] for one in processes] == list(SERVICES)
    assert {one["version"] for one in processes} == {version("stepwell")}
    assert len({one["protocol"] for one in processes}) == 1
    for one in processes:
        assert 0 < time.time() - one["started_unix_seconds"] < 3600


def ask(stack: Stack) -> tuple[str, str]:
    """Sends a request, and returns its trace id and its request id."""
    trace_id = secrets.token_hex(16)
    answer = http_post(
        f"{stack.url}/v1/completions",
        json={"prompt": "where does the time go?", "max_tokens": 5, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    return trace_id, answer.json()["id"]


def services_in(stack: Stack, trace_id: str) -> set[str]:
    trace = http_get(f"{stack.url}/traces/{trace_id}").json()
    return {span["service"].removeprefix("stepwell-") for span in trace["spans"]}


def test_a_traced_request_is_shown_through_all_services(stack: Stack) -> None:
    """The client's trace context marks the request as sampled, so its trace is always kept."""
    trace_id, name = ask(stack)
    assert name in stepwell(stack, "trace", "--limit", "5")
    wait_for(lambda: services_in(stack, trace_id) == {"gateway", "scheduler", "kvpool"}, 30)
    lines = stepwell(stack, "trace", name, "--width", "90").split("\n")
    assert lines[0].startswith(name)
    assert len([line for line in lines if re.search(r"[█▏].* \d.* (s|ms|µs)$", line)]) >= 4
    assert max(map(len, lines)) <= 90


def test_a_trace_that_is_not_kept_is_one_sentence(stack: Stack) -> None:
    answer = http_get(f"{stack.url}/traces/cmpl-nothing")
    assert answer.status_code == 404
    assert "no trace of 'cmpl-nothing' is kept" in answer.json()["error"]["message"]


def test_a_gateway_that_hung_has_the_spans_of_the_others_once(
    stack_of: Callable[[str], Stack],
) -> None:
    stack = stack_of("chunks of 7")
    trace_id, _ = ask(stack)
    stack.hit("gateway", signal.SIGSTOP)
    time.sleep(2)  # several times the time limit of an export
    stack.hit("gateway", signal.SIGCONT)
    wait_for(lambda: services_in(stack, trace_id) == {"gateway", "scheduler", "kvpool"}, 30)
    spans = http_get(f"{stack.url}/traces/{trace_id}").json()["spans"]
    assert len({span["span_id"] for span in spans}) == len(spans)
    assert not any("spans are dropped" in line for line in stack.output)


def test_streams_of_a_check_begin_again_until_their_answers_are_wanted(stack: Stack) -> None:
    def num_answers() -> float:
        metrics = http_get(f"{stack.url}/metrics").text
        found = re.findall(r"^vllm:request_success_total.* (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, found))

    streams = GatewayFleet(stack.url, num_streams=2, max_tokens=4).streams()
    before = num_answers()
    streams.begin()
    wait_for(lambda: num_answers() > before + 6, 30)
    for answer in streams.answers():
        assert (len(answer.texts), answer.error) == (1, "")
