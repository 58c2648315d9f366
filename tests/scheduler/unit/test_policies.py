"""The table of scheduling policies, and an example of the code that a new policy needs."""

import pytest

from services.cli.replay.settings import parse_override
from services.common.errors import InvalidArgument
from services.common.process.settings import SettingError, parse_settings
from services.common.request.sampling import SamplingParams
from services.scheduler.core.policies import POLICIES, find_policy, unused_settings
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import StepCosts
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.shortest_prompt_first import ShortestPromptFirstPolicy
from tests.scheduler.story import Story, prompt

ANY_PARTS = PolicyParts(Story().config, lambda: 0.0, StepCosts())
NAME = "shortest-prompt-first"


def settings(policy: str, *more: str) -> SchedulerSettings:
    argv = ["--kvpool", "unix:pool", "--workers", "unix:worker", "--policy", policy, *more]
    return parse_settings(SchedulerSettings, "scheduler", argv, {})


async def test_a_new_policy_is_one_new_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, NAME, ShortestPromptFirstPolicy)  # the line to add
    assert settings(NAME).policy == NAME
    assert parse_override(f"policy={NAME}") == ("policy", NAME)
    story = Story(policy=NAME, num_blocks=6, max_num_seqs=2)
    story.add("long", prompt(8))
    story.add("longer", prompt(9, first=200))
    story.add("short", prompt(4, first=300))
    first = await story.step()
    assert (first.new, story.waiting) == (["short", "long"], ["longer"])
    steps = await story.steps(5)
    assert [told.preempted for told in steps] == [[], [], [], [], ["long"]]
    assert story.waiting == ["long", "longer"]
    assert story.running == ["short"]


@pytest.mark.parametrize("name", ["lottery", "FCFS", ""])
def test_a_policy_that_does_not_exist_is_refused_at_the_start(name: str) -> None:
    known = ", ".join(POLICIES)
    with pytest.raises(SettingError, match=f"--policy must be one of {known}, not"):
        settings(name)
    with pytest.raises(InvalidArgument, match=f"policy must be one of {known}, not") as error:
        find_policy(name)
    assert error.value.field == "policy"
    with pytest.raises(InvalidArgument):
        Story(policy=name)


@pytest.mark.parametrize(
    ("setting", "policies"),
    [
        ({"program_idle_seconds": 60.0}, {"program", "continuum-fixed", "continuum-ttl"}),
        ({"max_num_programs": 9}, {"program", "continuum-fixed", "continuum-ttl"}),
        ({"retention_headroom": 0.0}, {"program"}),
        ({"aging_interval": 1}, {"program"}),
        ({"max_warm_admissions": 1}, {"program"}),
    ],
)
def test_settings_that_the_policy_does_not_use_are_known_by_name(
    setting: dict[str, float], policies: set[str]
) -> None:
    (name,) = setting
    assert {one for one in POLICIES if not unused_settings(one, setting)} == policies
    assert unused_settings("fcfs", setting) == [name]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--retention-headroom", "0.6"),
        ("--retention-headroom", "-0.1"),
        ("--aging-interval", "0"),
        ("--max-warm-admissions", "0"),
        ("--max-num-programs", "0"),
        ("--program-idle-seconds", "0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"{flag} must be"):
        settings("program", flag, value)


@pytest.mark.parametrize(("name", "uses_priority"), [("fcfs", False), ("priority", True)])
def test_only_a_policy_that_uses_priorities_takes_them(name: str, uses_priority: bool) -> None:
    assert find_policy(name).uses_priority == uses_priority


def test_a_session_at_the_head_of_the_queue_keeps_its_place_when_its_input_comes() -> None:
    queue = PriorityPolicy(ANY_PARTS).create_request_queue()
    requests = [
        Request(name, number, [1], 1, SamplingParams(), arrival_time=number)
        for number, name in enumerate("abc")
    ]
    for request in requests:
        queue.add(request)
    for request in requests[:2]:
        request.arrival_time = 9 - request.key
        queue.reorder()
    assert [request.request_id for request in queue] == ["a", "c", "b"]


def test_sessions_move_by_their_input_once_another_request_ends() -> None:
    queue = PriorityPolicy(ANY_PARTS).create_request_queue()
    requests = [
        Request(name, number, [1], 1, SamplingParams(), arrival_time=number)
        for number, name in enumerate("ba")
    ]
    for request in requests:
        queue.add(request)
    for request in requests:
        request.arrival_time = 9
        queue.reorder()
    assert [request.request_id for request in queue] == ["b", "a"]
    queue.put_in_order()
    assert [request.request_id for request in queue] == ["a", "b"]
