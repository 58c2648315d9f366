"""Why requests wait: each reason is recorded with its first step and its number of steps."""

import itertools
import sys
from collections.abc import Sequence
from types import FrameType

from services.scheduler.adapters.telemetry.wait_reasons import (
    MAX_CHANGES,
    ReasonChange,
    WaitReasons,
    WaitStart,
)
from services.scheduler.core.output import SchedulerOutput, WaitReason
from tests.scheduler.story import Story, prompt
from tests.scheduler.traced_story import TracedStory

BUDGET = WaitReason.BUDGET
MAX_SEQS = WaitReason.MAX_SEQS
NO_BLOCKS = WaitReason.NO_BLOCKS
PAUSED = WaitReason.PAUSED
RECOVERY = WaitReason.RECOVERY


class Book:
    """Records the wait reasons in planned steps. Its clock advances by one at each reading."""

    def __init__(self) -> None:
        self.reasons = WaitReasons()
        self.now = itertools.count(1).__next__
        self._steps = itertools.count()

    def begin(self) -> WaitStart:
        return self.reasons.begin(self.now())

    def steps(self, *reasons: WaitReason | None) -> None:
        for reason in reasons:
            plan = SchedulerOutput(next(self._steps), wait_reason=reason)
            self.reasons.planned(plan, self.now())


def steps_and_reasons(changes: Sequence[ReasonChange]) -> list[tuple[int, WaitReason]]:
    return [(change.step, change.reason) for change in changes]


def test_a_request_reads_what_was_noted_while_it_waited() -> None:
    book = Book()
    book.steps(None, BUDGET, NO_BLOCKS)
    waiting = book.begin()
    book.steps(MAX_SEQS, MAX_SEQS, NO_BLOCKS, MAX_SEQS)
    assert book.reasons.steps_since(waiting) == {MAX_SEQS: 3, NO_BLOCKS: 1}
    assert steps_and_reasons(book.reasons.changes_since(waiting)) == [
        (3, MAX_SEQS),
        (5, NO_BLOCKS),
        (6, MAX_SEQS),
    ]


def test_what_was_in_the_way_before_it_came_counts_from_its_own_first_step() -> None:
    book = Book()
    book.steps(NO_BLOCKS, NO_BLOCKS)
    waiting = book.begin()
    book.steps(NO_BLOCKS, BUDGET)
    changes = book.reasons.changes_since(waiting)
    assert steps_and_reasons(changes) == [(2, NO_BLOCKS), (3, BUDGET)]
    assert changes[0].unix_nanos == waiting.unix_nanos < changes[1].unix_nanos


def test_what_ended_before_its_first_step_does_not_count() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.begin()
    book.steps(BUDGET, NO_BLOCKS)
    assert steps_and_reasons(book.reasons.changes_since(waiting)) == [(1, BUDGET), (2, NO_BLOCKS)]


def test_a_request_that_is_admitted_at_once_never_waited() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.begin()
    assert book.reasons.changes_since(waiting) == []
    assert not book.reasons.steps_since(waiting)


def test_a_pause_is_a_reason_without_steps() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    before = book.begin()
    book.reasons.paused(book.now())
    book.reasons.paused(book.now())
    within = book.begin()
    book.reasons.resumed()
    after = book.begin()
    book.steps(NO_BLOCKS)
    assert steps_and_reasons(book.reasons.changes_since(before)) == [(1, PAUSED), (1, NO_BLOCKS)]
    assert steps_and_reasons(book.reasons.changes_since(within)) == [(1, PAUSED), (1, NO_BLOCKS)]
    assert steps_and_reasons(book.reasons.changes_since(after)) == [(1, NO_BLOCKS)]
    assert book.reasons.steps_since(before) == {NO_BLOCKS: 1}


def test_a_step_that_was_being_planned_does_not_end_a_pause() -> None:
    book = Book()
    waiting = book.begin()
    book.reasons.paused(book.now())
    book.steps(NO_BLOCKS)
    assert book.reasons.current is PAUSED
    so_far = steps_and_reasons(book.reasons.changes_since(waiting))
    assert so_far == [(0, PAUSED), (0, NO_BLOCKS), (1, PAUSED)]
    book.reasons.resumed()
    assert book.reasons.current is None


def test_a_recovery_is_a_reason_without_steps() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    book.reasons.lost(book.now())
    within = book.begin()
    book.reasons.paused(book.now())
    book.reasons.recovered(book.now())
    book.reasons.resumed()
    book.steps(NO_BLOCKS)
    changes = steps_and_reasons(book.reasons.changes_since(within))
    assert changes == [(1, RECOVERY), (1, PAUSED), (1, NO_BLOCKS)]


def test_the_newest_changes_are_remembered_and_no_more() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.begin()
    book.steps(*[BUDGET, NO_BLOCKS] * MAX_CHANGES)
    changes = book.reasons.changes_since(waiting)
    assert len(changes) == MAX_CHANGES
    assert steps_and_reasons(changes)[-1] == (2 * MAX_CHANGES, NO_BLOCKS)
    assert book.reasons.steps_since(waiting) == {BUDGET: MAX_CHANGES, NO_BLOCKS: MAX_CHANGES}
    assert book.reasons.has_forgotten(waiting)
    assert not book.reasons.has_forgotten(book.begin())


# The reasons for which the scheduler lets requests wait


async def reason_of(story: Story) -> WaitReason | None:
    plan = await story.scheduler.schedule()
    story.take_in(plan, story.model.run_plan(plan))
    return plan.wait_reason


async def test_every_reason_has_its_story() -> None:
    story = Story(max_num_batched_tokens=8)
    story.add("a", prompt(8))
    story.add("b", prompt(8, 500))
    assert await reason_of(story) is BUDGET

    story = Story(max_num_seqs=1)
    story.add("a", prompt(8))
    story.add("b", prompt(8, 500))
    assert await reason_of(story) is MAX_SEQS

    story = Story(num_blocks=4)
    story.add("a", prompt(8))
    story.add("b", prompt(8, 500))
    assert await reason_of(story) is NO_BLOCKS

    story = Story(enable_chunked_prefill=False, max_num_batched_tokens=10, max_model_len=10)
    story.add("a", prompt(6))
    story.add("b", prompt(6, 500))
    assert await reason_of(story) is BUDGET

    story = Story()
    story.add("a", prompt(8))
    assert await reason_of(story) is None


async def test_a_preempted_request_waits_for_blocks_and_so_do_those_behind() -> None:
    story = Story(num_blocks=4)
    story.add("a", prompt(8), max_tokens=6)
    story.add("b", prompt(4, 500))
    assert await reason_of(story) is None
    story.add("c", prompt(4, 700))
    plan = await story.scheduler.schedule()
    assert (plan.wait_reason, story.waiting) == (NO_BLOCKS, ["b", "c"])
    (preemption,) = plan.preemptions
    assert (preemption.victim.request_id, preemption.cause.request_id) == ("b", "a")
    assert preemption.num_lost_tokens == 4


async def num_calls_of_a_step(num_waiting: int) -> int:
    """How often functions of the scheduler are called when a step is planned and observed."""
    story = TracedStory(max_num_seqs=1)
    story.arrive("running", prompt(5))
    for number in range(num_waiting):
        story.arrive(f"{number}", prompt(5))
    for _ in range(2):
        await story.watched_step()
    count = 0

    def counting(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and "/services/scheduler/" in frame.f_code.co_filename

    story.tracer.begin()
    sys.setprofile(counting)
    try:
        plan = await story.scheduler.schedule()
        story.tracer.planned(plan)
    finally:
        sys.setprofile(None)
    assert plan.wait_reason is MAX_SEQS
    assert count > 10
    return count


async def test_explaining_costs_the_same_however_many_wait() -> None:
    assert await num_calls_of_a_step(500) == await num_calls_of_a_step(1)
