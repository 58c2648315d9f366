"""The engine finds the request whose steps always fail and ends it. Other requests continue."""

from collections.abc import AsyncIterator

import pytest

from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.scheduler.core.engine.fault_search import FaultSearch
from services.scheduler.core.engine.recovery import Losses
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request, RequestStatus
from tests.scheduler.engine_bench import Bench, eventually, running
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import prompt

POISON = 777


@pytest.fixture(params=[False, True], ids=["one step in flight", "two steps in flight"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with running(Bench(async_scheduling=request.param)) as bench:
        bench.executor.poison = frozenset({POISON})
        yield bench


def make_requests(*names: str) -> list[Request]:
    return [
        Request(name, key, [1] * 10, 10, SamplingParams(max_tokens=10))
        for key, name in enumerate(names)
    ]


def plan(requests: list[Request], num_tokens: int = 10) -> SchedulerOutput:
    count = len(requests)
    return SchedulerOutput(
        step=1,
        requests=requests,
        num_scheduled_tokens=[num_tokens] * count,
        num_computed_tokens=[0] * count,
    )


def test_after_one_failure_all_may_run_and_getting_past_it_clears() -> None:
    search, requests = FaultSearch(), make_requests("a", "b")
    assert search.steps_failed([plan(requests)]) is None
    assert (search.is_active, search.trial()) == (True, None)
    search.step_done(plan(requests, 6))
    assert search.is_active, "not all tokens of the failed step were computed"
    search.step_done(plan(requests, 10))
    assert not search.is_active


def test_a_second_failure_is_searched_by_halving_and_the_oldest_run_first() -> None:
    search, requests = FaultSearch(), make_requests("a", "b", "c", "d")
    a, b, c, d = requests
    search.steps_failed([plan(requests)])
    search.steps_failed([plan(requests)])
    assert search.trial() == [a, b]
    search.step_done(plan([a, b]))
    assert search.trial() == [c], "with a and b cleared, c or d it is: no need to try both"
    search.step_done(plan([c]))
    assert search.trial() == [d]
    assert search.steps_failed([plan([d])]) is None
    assert search.steps_failed([plan([d])]) is d
    assert search.trial() is None
    assert not search.is_active


def test_workers_that_are_lost_for_another_reason_clear_all_requests_in_the_end() -> None:
    search, requests = FaultSearch(), make_requests("a", "b", "c")
    search.steps_failed([plan(requests)])
    search.steps_failed([plan(requests)])
    tried: list[list[str]] = []
    while (trial := search.trial()) is not None:
        tried.append([request.request_id for request in trial])
        search.step_done(plan(list(trial)))
    assert tried == [["a"], ["b"], ["c"]]
    assert not search.is_active


def test_a_group_whose_requests_ended_holds_no_request_back() -> None:
    search, requests = FaultSearch(), make_requests("a", "b", "c", "d")
    search.steps_failed([plan(requests)])
    search.steps_failed([plan(requests)])
    for request in requests:
        request.finish(FinishReason.ABORT)
    assert search.trial() is None
    assert not search.is_active


def test_steps_without_a_suspect_bring_new_suspects_and_no_verdict() -> None:
    search = FaultSearch()
    first, second = make_requests("a", "b")
    assert search.steps_failed([plan([first])]) is None
    assert search.steps_failed([plan([second])]) is None
    search.step_done(plan([first, second]))
    assert not search.is_active
    assert search.steps_failed([plan([first])]) is None
    assert search.trial() is None, "two failures with a step that was done between them"


async def test_a_request_that_breaks_every_step_is_ended_and_the_others_go_on(bench: Bench) -> None:
    innocent = {name: prompt(9, 100 * number) for number, name in enumerate("abc")}
    for name, token_ids in innocent.items():
        bench.add(name, token_ids, max_tokens=20)
    await bench.until_tokens("c", 3)
    culprit = bench.add("poison", [*prompt(5, 500), POISON], max_tokens=20)
    await bench.until_ended(*innocent, "poison")
    assert culprit.finish_reason is FinishReason.STEP_FAILED
    assert bench.inbox.tokens["poison"] == []
    for name, token_ids in innocent.items():
        assert bench.inbox.tokens[name] == continuation(token_ids, 20)
    assert bench.executor.broken_by[-1] == {"poison"}
    assert len(bench.executor.broken_by) <= 6, "not one recovery after the other"
    await bench.until_idle()
    assert bench.engine.scheduler.queues.held_back == {}


async def test_two_requests_that_break_their_steps_are_both_ended(bench: Bench) -> None:
    innocent = {name: prompt(9, 100 * number) for number, name in enumerate("ab")}
    for name, token_ids in innocent.items():
        bench.add(name, token_ids, max_tokens=20)
    culprits = [bench.add(name, [*prompt(5, 500), POISON], max_tokens=20) for name in ("x", "y")]
    await bench.until_ended(*innocent, "x", "y")
    assert [culprit.finish_reason for culprit in culprits] == [FinishReason.STEP_FAILED] * 2
    for name, token_ids in innocent.items():
        assert bench.inbox.tokens[name] == continuation(token_ids, 20)
    await bench.until_idle()


async def test_a_request_that_breaks_a_later_step_of_its_own_keeps_its_tokens() -> None:
    said = continuation(prompt(9), 20)
    async with running(Bench()) as bench:
        bench.executor.poison = frozenset({said[6]})
        culprit = bench.add("poison", prompt(9), max_tokens=20)
        bench.add("b", prompt(9, 500), max_tokens=60)
        await bench.until_ended("poison", "b")
    assert culprit.finish_reason is FinishReason.STEP_FAILED
    assert bench.inbox.tokens["poison"] == said[:7]
    assert bench.inbox.tokens["b"] == continuation(prompt(9, 500), 60)


async def test_workers_that_are_killed_again_and_again_blame_no_request(bench: Bench) -> None:
    names = ("a", "b", "c")
    for number, name in enumerate(names):
        bench.add(name, prompt(9, 200 * number), max_tokens=60)
    for known in range(3, 33, 3):
        await bench.until_tokens("c", known)
        reopened = bench.replica.num_reopened
        bench.executor.lose()
        await eventually(lambda before=reopened: bench.replica.num_reopened > before)
    await bench.until_ended(*names)
    for number, name in enumerate(names):
        assert bench.inbox.tokens[name] == continuation(prompt(9, 200 * number), 60)


async def test_a_lone_request_survives_two_kills_before_its_first_step_is_done(
    bench: Bench,
) -> None:
    request = bench.add("a", prompt(9), max_tokens=20)
    await bench.until_tokens("a", 3)
    for kill in range(2):
        bench.executor.hold()
        await eventually(lambda: bench.executor.num_in_flight > 0)
        bench.executor.lose()
        await eventually(lambda before=kill: bench.replica.num_reopened > before)
    await bench.until_ended("a")
    assert request.finish_reason is FinishReason.LENGTH
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 20)


async def test_requests_that_arrive_during_the_search_run_after_it_in_their_order(
    bench: Bench,
) -> None:
    bench.add("a", prompt(9), max_tokens=20)
    bench.add("poison", [*prompt(5, 500), POISON], max_tokens=20)
    await eventually(lambda: bench.engine.scheduler.queues.held_back != {})
    for name in ("late", "later"):
        bench.add(name, prompt(5, 700), max_tokens=3)
    given_up = bench.add("given up", prompt(5, 800), max_tokens=3)
    await eventually(lambda: given_up in bench.engine.scheduler.queues.held_back)
    bench.engine.changes.abort([given_up])
    await bench.until_ended("a", "poison", "late", "later", "given up")
    assert given_up.finish_reason is FinishReason.ABORT
    ended = bench.inbox.ended
    assert ended.index("late") < ended.index("later")


async def test_a_session_whose_turn_ends_during_the_search_delays_no_other_request(
    bench: Bench,
) -> None:
    """The lost steps had more drafts than the next attempt, so they reached more tokens."""
    session = bench.add("session", prompt(9), max_tokens=6, resumable=True)
    bench.add("other", prompt(5, 500), max_tokens=20)
    await bench.until_tokens("session", 2)
    for _ in range(2):
        bench.engine._recovery.steps_failed([SchedulerOutput(-1, [session], [5], [40])])
    await bench.until_ended("other")
    assert session.status is RequestStatus.WAITING_FOR_CHUNK


def test_recoveries_in_a_row_wait_longer_and_longer() -> None:
    losses, waits = Losses(), []
    for _ in range(10):
        waits.append(losses.backoff_seconds)
        losses.recovered()
    assert waits[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == 5.0
