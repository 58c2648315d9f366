"""All services with the policy `program`, and agents whose sequences exceed the KV cache."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.telemetry.metric_specs import replica
from tests.e2e.simulated_agents import simulated_stack, turn, values
from tests.e2e.stack import SERVICES, Stack
from tests.gateway.gateway_process import process, serving_address
from tests.plain_http import http_get, http_post
from tests.waiting import wait_for

NUM_PROGRAMS, NUM_TURNS = 8, 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("programs")
    with closing(simulated_stack(directory, "--trace-sample-ratio", "1")) as running:
        yield running


def run_program(stack: Stack, number: int) -> int:
    """Sends the turns (requests) of a program. Returns the number of cached prompt tokens."""
    context, num_cached = [7 + (number * 31 + place) % 90 for place in range(60)], 0
    for place in range(NUM_TURNS):
        context, num_found = turn(stack.url, context)
        num_cached += num_found if place else 0
        context += range(20, 28)
        time.sleep(0.05)
    return num_cached


def test_agents_get_their_answers_and_find_their_contexts(stack: Stack) -> None:
    with ThreadPoolExecutor(NUM_PROGRAMS) as pool:
        cached = list(pool.map(lambda number: run_program(stack, number), range(NUM_PROGRAMS)))
    # Of a program's last three prompts, at most 64 + 80 + 96 = 240 tokens are in whole blocks.
    assert sum(cached) > 0.5 * NUM_PROGRAMS * 240
    stack.wait_until_nothing_is_held()


def test_a_programs_turns_are_drawn(stack: Stack) -> None:
    job = {"job_id": "drawn", "this_func_call": "grep"}
    context, _ = turn(stack.url, [*range(33, 93)], **job)
    time.sleep(0.2)
    turn(stack.url, [*context, 21, 22], **job)
    command = [sys.executable, "-m", "services.cli", "trace", "--url", stack.url]

    def drawn() -> str:
        asked = [*command, "--program", "drawn", "--width", "100"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.stdout

    wait_for(lambda: "turn 2" in drawn(), 20)
    title, first, pause, second = drawn().splitlines()
    assert title.startswith("drawn: 2 turns traced, ")
    assert first.startswith("turn 1 ")
    assert "grep" in pause
    assert "context 72" in second
    unknown = subprocess.run(
        [*command, "--program", "other"], capture_output=True, text=True, check=False
    )
    assert "no turn of program other has been traced" in unknown.stderr


def test_every_metric_of_programs_is_served(stack: Stack) -> None:
    text = http_get(f"{stack.url}/metrics").text
    served = {family.name for family in text_string_to_metric_families(text)}
    specs = (replica.PROGRAMS, replica.PROGRAMS_BEGUN, replica.PROGRAM_SECONDS)
    specs += (replica.PROGRAM_TURNS, replica.PAUSE_SECONDS, replica.RETAINED_BLOCKS)
    specs += (replica.RETAINED_BLOCKS_TAKEN, replica.RECOMPUTED_TOKENS)
    assert {spec.name for spec in specs} <= served


def test_a_gateway_killed_in_a_pause_costs_nothing(stack: Stack) -> None:
    """Two gateways use the scheduler. The one that served the first turn is killed."""
    socket = stack.address("scheduler")
    flags = ("--model", str(stack.directory), "--schedulers", socket)
    flags += ("--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
    job = {"job_id": "two gateways", "this_func_call": "sleep"}
    before = num_begun(stack)
    with process(*flags) as other:
        url = f"http://{serving_address(other)}"
        wait_for(lambda: http_get(f"{url}/health").status_code == httpx.codes.OK)
        context, _ = turn(url, [*range(20, 80), 5], **job)
        other.kill()
        other.wait()
        context, num_cached = turn(stack.url, [*context, *range(20, 28)], **job)
    assert num_cached >= 64
    assert num_begun(stack) == before + 1
    assert values(stack, "stepwell_pause_seconds_count", "tool")["sleep"] == 1
    turn(stack.url, [*context, 7], **job, is_last_step=True)
    stack.wait_until_nothing_is_held()


def num_begun(stack: Stack) -> float:
    return sum(values(stack, "stepwell_programs_begun_total", "source").values())


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "a first turn"}])
def test_the_tool_of_an_answer_is_that_of_the_pause(stack: Stack, headers: dict[str, str]) -> None:
    """The request names neither the program nor the tool. The gateway finds the tool in the answer.
    The scheduler finds the program by the prompt, although the chat template renders the answer
    differently.
    """
    tool = {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}
    body = {
        "messages": [{"role": "user", "content": f"What is the time, please, {[*headers]}?"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "max_tokens": 60,
    }
    before = values(stack, "stepwell_pause_seconds_count", "tool").get("now", 0)
    url = f"{stack.url}/v1/chat/completions"
    answer = http_post(url, json=body, headers=headers).json()
    message = answer["choices"][0]["message"]
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"now"}
    body["messages"] += [
        message,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": "noon"}
            for call in message["tool_calls"]
        ),
    ]
    body["tool_choice"] = "none"
    assert http_post(url, json=body).status_code == 200
    assert values(stack, "stepwell_pause_seconds_count", "tool")["now"] == before + 1


@pytest.mark.parametrize("service", ["kvpool", "worker", "scheduler"])
def test_a_loss_in_a_pause_costs_the_context_and_nothing_else(stack: Stack, service: str) -> None:
    job = {"job_id": f"loses-{service}", "this_func_call": "grep"}
    context, _ = turn(stack.url, [*range(30, 90), SERVICES.index(service)], **job)
    before, pid = num_begun(stack), stack.pids()[service]
    stack.hit(service)
    stack.wait_until_back(service, pid)
    context, num_cached = turn(stack.url, [*context, *range(20, 28)], **job)
    assert num_cached == 0
    assert num_begun(stack) == (1 if service == "scheduler" else before)
    _, num_cached = turn(stack.url, [*context, *range(20, 28)], **job, is_last_step=True)
    assert num_cached >= 64
    stack.wait_until_nothing_is_held()


@pytest.mark.parametrize(
    "fields_of",
    [
        lambda _agent, turn: {"job_id": "the only one", "this_func_call": f"tool {turn}"},
        lambda agent, turn: {"session_id": f"{agent} {turn}"},
        lambda agent, turn: {"job_id": f"{agent}", "is_last_step": True, "cache_salt": f"{turn}"},
    ],
    ids=["one name for all", "another name for each turn", "always the last turn"],
)
def test_wrong_names_change_no_answer(
    stack: Stack, fields_of: Callable[[int, int], dict[str, object]]
) -> None:
    def run(agent: int) -> None:
        context = [7 + (agent * 37 + place) % 90 for place in range(60)]
        for number in range(NUM_TURNS):
            context, _ = turn(stack.url, context, **fields_of(agent, number))
            context += range(20, 28)

    with ThreadPoolExecutor(NUM_PROGRAMS) as pool:
        list(pool.map(run, range(NUM_PROGRAMS)))
    stack.wait_until_nothing_is_held()


def test_a_parent_that_the_program_started_is_refused_by_name(stack: Stack) -> None:
    def asked(name: str, parent: str) -> httpx.Response:
        headers = {"X-Session-ID": name, "X-Dynamo-Parent-Session-ID": parent}
        body = {"prompt": [*range(30, 60)], "max_tokens": 2}
        return http_post(f"{stack.url}/v1/completions", json=body, headers=headers)

    assert [asked("child", "").status_code, asked("grandchild", "child").status_code] == [200, 200]
    for name in ("child", "grandchild"):
        refused = asked(name, "grandchild")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "X-Dynamo-Parent-Session-ID"
