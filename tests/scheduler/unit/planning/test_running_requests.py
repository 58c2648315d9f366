"""Running requests in the order of their admission, and which of them a step must examine."""

import pytest

from services.common.request.sampling import SamplingParams
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.request import Request
from tests.scheduler.story import Story, names, prompt


def requests_running(*request_ids: str) -> tuple[RunningRequests, dict[str, Request]]:
    """Requests that were admitted in this order. Each has ten computed tokens."""
    running = RunningRequests()
    requests = {
        name: Request(name, key, [7] * 10, 10, SamplingParams(max_tokens=50))
        for key, name in enumerate(request_ids)
    }
    for request in requests.values():
        request.num_computed_tokens = 10
        running.append(request)
    return running, requests


def plan_steps(running: RunningRequests, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        running.off_fast_path(0)
        running.advance()


def test_requests_run_in_the_order_of_admission_and_begin_off_the_fast_path() -> None:
    running, of = requests_running("a", "b", "c")
    assert names(running.off_fast_path(0)) == ["a", "b", "c"]
    running.remove(of["a"])
    running.append(of["a"])
    assert names(running) == ["b", "c", "a"]
    assert [running.index(of[name]) for name in "bca"] == [0, 1, 2]
    assert names(running.off_fast_path(2)) == ["a"]
    assert names(running.between(0, 2)) == ["b", "c"]
    assert names(reversed(running)) == ["a", "c", "b"]


def test_on_the_fast_path_each_step_computes_one_token_until_the_steps_are_over() -> None:
    running, of = requests_running("a", "b")
    running.enter_fast_path({of["b"]: 2})
    assert of["b"].is_on_fast_path
    assert names(running.off_fast_path(0)) == ["a"]
    plan_steps(running)
    assert (of["a"].num_computed_tokens, of["b"].num_computed_tokens) == (10, 11)
    assert names(running.leaving_fast_path()) == ["b"]
    plan_steps(running)
    assert names(running.off_fast_path(0)) == ["a", "b"]
    assert not of["b"].is_on_fast_path
    assert of["b"].num_computed_tokens == 12
    plan_steps(running)
    assert of["b"].num_computed_tokens == 12


def test_a_request_that_leaves_the_fast_path_early_keeps_its_count() -> None:
    running, of = requests_running("a", "b")
    running.enter_fast_path({of["a"]: 3})
    running.enter_fast_path({of["b"]: 3})
    plan_steps(running)
    running.leave_fast_path(of["a"])
    running.leave_fast_path(of["a"])
    assert names(running.off_fast_path(0)) == ["a"]
    assert of["a"].num_computed_tokens == 11
    running.enter_fast_path({of["a"]: 5})
    plan_steps(running, 2)
    assert names(running.off_fast_path(0)) == ["b"]
    assert (of["a"].num_computed_tokens, of["b"].num_computed_tokens) == (13, 13)


def test_the_count_of_computed_tokens_can_be_set_on_the_fast_path_and_off_it() -> None:
    running, of = requests_running("a")
    running.enter_fast_path({of["a"]: 3})
    plan_steps(running)
    of["a"].num_computed_tokens = 5
    plan_steps(running)
    assert of["a"].num_computed_tokens == 6


def test_a_request_that_is_removed_leaves_the_calendar_too() -> None:
    running, of = requests_running("a", "b")
    running.enter_fast_path({of["a"]: 1})
    running.remove(of["a"])
    plan_steps(running)
    assert names(running.off_fast_path(0)) == ["b"]
    assert of["a"].num_computed_tokens == 10


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_a_step_looks_only_at_requests_to_which_something_happens(
    async_scheduling: bool,
) -> None:
    story = Story(num_blocks=200, block_size=16, async_scheduling=async_scheduling)
    for number in range(8):
        story.add(str(number), prompt(16 + number), max_tokens=40)
    await story.steps(3)
    looked_at = []
    for _ in range(16):
        looked_at.append(len(story.scheduler.running.off_fast_path(0)))
        assert len((await story.step()).granted) == 8
    assert sum(looked_at) <= 3 * 8
    assert looked_at.count(0) >= 5
