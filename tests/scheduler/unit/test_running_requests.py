"""Who runs: the order of admission, and who sleeps until when."""

import pytest

from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.running_requests import RunningRequests
from tests.scheduler.story import Story, names, prompt


def running(*request_ids: str) -> tuple[RunningRequests, dict[str, Request]]:
    """Requests that were admitted in this order, each with ten tokens computed."""
    requests = {
        name: Request(name, key, [7] * 10, 10, StopConditions(50), origin=10)
        for key, name in enumerate(request_ids)
    }
    everybody = RunningRequests()
    for request in requests.values():
        everybody.append(request)
    return everybody, requests


def tick(everybody: RunningRequests, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        everybody.awake(0)
        everybody.clock.now += 1


def test_a_request_begins_awake_and_has_its_place_in_the_order_of_admission() -> None:
    everybody, of = running("a", "b", "c")
    assert names(everybody.awake(0)) == ["a", "b", "c"]
    everybody.remove(of["a"])
    everybody.append(of["a"])
    assert names(everybody) == ["b", "c", "a"]
    assert [everybody.place(of[name]) for name in "bca"] == [0, 1, 2]
    assert names(everybody.awake(2)) == ["a"]
    assert names(everybody.between(0, 2)) == ["b", "c"]
    assert names(reversed(everybody)) == ["a", "c", "b"]


def test_who_sleeps_computes_one_token_in_each_step_and_wakes_when_it_is_time() -> None:
    everybody, of = running("a", "b")
    everybody.sleep(of["b"], 2)
    assert names(everybody.awake(0)) == ["a"]
    tick(everybody)
    assert (of["a"].num_computed_tokens, of["b"].num_computed_tokens) == (10, 11)
    assert names(everybody.waking()) == ["b"]
    tick(everybody)
    assert names(everybody.awake(0)) == ["a", "b"]
    assert of["b"].num_computed_tokens == 12
    tick(everybody)
    assert of["b"].num_computed_tokens == 12


def test_who_is_roused_keeps_what_was_computed_and_does_not_wake_again() -> None:
    everybody, of = running("a", "b")
    everybody.sleep(of["a"], 3)
    everybody.sleep(of["b"], 3)
    tick(everybody)
    everybody.rouse(of["a"])
    everybody.rouse(of["a"])
    assert names(everybody.awake(0)) == ["a"]
    assert of["a"].num_computed_tokens == 11
    everybody.sleep(of["a"], 5)
    tick(everybody, 2)
    assert names(everybody.awake(0)) == ["b"]
    assert (of["a"].num_computed_tokens, of["b"].num_computed_tokens) == (13, 13)


def test_who_is_taken_out_asleep_is_not_waited_for() -> None:
    everybody, of = running("a", "b")
    everybody.sleep(of["a"], 1)
    everybody.remove(of["a"])
    tick(everybody)
    assert names(everybody.awake(0)) == ["b"]
    assert of["a"].num_computed_tokens == 10


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_a_step_looks_only_at_those_to_whom_something_happens(
    async_scheduling: bool,
) -> None:
    story = Story(num_blocks=200, block_size=16, async_scheduling=async_scheduling)
    for number in range(8):
        story.add(str(number), prompt(16 + number), max_tokens=40)
    await story.steps(3)
    looked_at = []
    for _ in range(16):
        looked_at.append(len(story.scheduler.running.awake(0)))
        assert len((await story.step()).granted) == 8
    assert sum(looked_at) <= 3 * 8
    assert looked_at.count(0) >= 5
