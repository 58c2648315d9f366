"""Each wait is explained: what was in a request's way, from which step on, for how many steps."""

import itertools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import names
from services.common.telemetry import configure_tracing
from services.scheduler.adapters.statistics import StepCounts
from services.scheduler.adapters.step_tracer import StepTracer
from services.scheduler.adapters.wait_reasons import MAX_CHANGES, ReasonChange, WaitReasons
from services.scheduler.core.output import SchedulerOutput, WaitReason
from services.scheduler.core.request import Request
from tests.scheduler.story import Story, prompt

BUDGET, MAX_SEQS, NO_BLOCKS, HELD_BACK, PAUSED = WaitReason


class Book:
    """Reasons of steps, with a clock that counts how often it is asked."""

    def __init__(self) -> None:
        self.reasons = WaitReasons(itertools.count(1).__next__)
        self._steps = itertools.count()

    def steps(self, *reasons: WaitReason | None) -> None:
        for reason in reasons:
            self.reasons.planned(next(self._steps), reason)


def steps_and_reasons(changes: Sequence[ReasonChange]) -> list[tuple[int, WaitReason]]:
    return [(change.step, change.reason) for change in changes]


def test_a_request_reads_what_was_noted_while_it_waited() -> None:
    book = Book()
    book.steps(None, BUDGET, NO_BLOCKS)
    waiting = book.reasons.begin()
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
    waiting = book.reasons.begin()
    book.steps(NO_BLOCKS, BUDGET)
    changes = book.reasons.changes_since(waiting)
    assert steps_and_reasons(changes) == [(2, NO_BLOCKS), (3, BUDGET)]
    assert changes[0].unix_nanos == waiting.unix_nanos < changes[1].unix_nanos


def test_what_ended_before_its_first_step_does_not_count() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.reasons.begin()
    book.steps(BUDGET, NO_BLOCKS)
    assert steps_and_reasons(book.reasons.changes_since(waiting)) == [(1, BUDGET), (2, NO_BLOCKS)]


def test_a_request_that_is_admitted_at_once_never_waited() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.reasons.begin()
    assert book.reasons.changes_since(waiting) == []
    assert not book.reasons.steps_since(waiting)


def test_a_pause_is_a_reason_without_steps() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    before = book.reasons.begin()
    book.reasons.paused()
    book.reasons.paused()
    within = book.reasons.begin()
    book.reasons.resumed()
    after = book.reasons.begin()
    book.steps(NO_BLOCKS)
    assert steps_and_reasons(book.reasons.changes_since(before)) == [(1, PAUSED), (1, NO_BLOCKS)]
    assert steps_and_reasons(book.reasons.changes_since(within)) == [(1, PAUSED), (1, NO_BLOCKS)]
    assert steps_and_reasons(book.reasons.changes_since(after)) == [(1, NO_BLOCKS)]
    assert book.reasons.steps_since(before) == {NO_BLOCKS: 1}


def test_a_step_that_was_being_planned_does_not_end_a_pause() -> None:
    book = Book()
    waiting = book.reasons.begin()
    book.reasons.paused()
    book.steps(NO_BLOCKS)
    assert book.reasons.current is PAUSED
    so_far = steps_and_reasons(book.reasons.changes_since(waiting))
    assert so_far == [(0, PAUSED), (0, NO_BLOCKS), (1, PAUSED)]
    book.reasons.resumed()
    assert book.reasons.current is None


def test_the_newest_changes_are_remembered_and_no_more() -> None:
    book = Book()
    book.steps(NO_BLOCKS)
    waiting = book.reasons.begin()
    book.steps(*[BUDGET, NO_BLOCKS] * MAX_CHANGES)
    changes = book.reasons.changes_since(waiting)
    assert len(changes) == MAX_CHANGES
    assert steps_and_reasons(changes)[-1] == (2 * MAX_CHANGES, NO_BLOCKS)
    assert book.reasons.steps_since(waiting) == {BUDGET: MAX_CHANGES, NO_BLOCKS: MAX_CHANGES}


# What is in the way, in the scheduler's words


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


# The same in traces


def trace_context(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


class TracedStory(Story):
    """A story whose steps are watched by the tracer."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.exporter = InMemorySpanExporter()
        self.counts = StepCounts()
        tracing = configure_tracing("scheduler", "", 1.0, exporter=self.exporter)
        self.tracer = StepTracer(tracing, self.counts)

    def arrive(self, name: str, token_ids: list[int], **fields: Any) -> Request:
        number = 1 + sum(map(ord, name))
        request = self.add(name, token_ids, traceparent=trace_context(number), **fields)
        self.tracer.arrived([request])
        return request

    async def watched_step(self) -> SchedulerOutput:
        self.tracer.begin()
        plan = await self.scheduler.schedule()
        self.tracer.planned(plan)
        update = self.scheduler.update_from_output(plan, self.model.run_plan(plan))
        if plan.requests or plan.removed_rows:
            self.tracer.done(plan, update)
        return plan

    def span(self, name: str, request: str) -> Any:
        trace_id = 1 + sum(map(ord, request))
        (span,) = [
            span
            for span in self.exporter.get_finished_spans()
            if span.name == name and span.context.trace_id == trace_id
        ]
        return span


def events(span: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            event.name,
            {key.removeprefix("stepwell."): value for key, value in event.attributes.items()},
        )
        for event in span.events
    ]


async def test_the_queue_span_tells_what_was_in_the_way() -> None:
    story = TracedStory(max_num_seqs=1, num_blocks=5)
    story.arrive("a", prompt(6), max_tokens=3)
    story.arrive("b", prompt(6, 500), max_tokens=1)
    await story.watched_step()
    story.tracer.paused()
    story.tracer.resumed()
    while story.scheduler.has_work:
        await story.watched_step()
    queue = story.span(names.SPAN_REQUEST_QUEUE, "b")
    assert events(queue) == [
        ("waiting", {"step": 0, "wait_reason": "max_seqs"}),
        ("waiting", {"step": 1, "wait_reason": "paused"}),
        ("waiting", {"step": 1, "wait_reason": "max_seqs"}),
    ]
    assert queue.attributes[f"{names.ATTR_WAIT_STEPS}.max_seqs"] == 3
    assert story.span(names.SPAN_REQUEST_QUEUE, "a").events == ()
    times = [event.timestamp for event in queue.events]
    assert times == sorted(times)


async def test_a_preemption_tells_its_cause_its_cost_and_the_wait_that_follows() -> None:
    story = TracedStory(num_blocks=4)
    story.arrive("a", prompt(8), max_tokens=4)
    story.arrive("b", prompt(4, 500), max_tokens=3)
    while story.scheduler.has_work:
        await story.watched_step()
    decode = story.span(names.SPAN_REQUEST_DECODE, "b")
    assert events(decode) == [
        ("preempted", {"step": 1, "preempted_for": "a", "num_lost_tokens": 4}),
        ("waiting", {"step": 1, "wait_reason": "no_blocks"}),
        ("resumed", {"step": 4, "wait_steps.no_blocks": 3}),
    ]
    assert story.counts.num_lost_tokens == 4
    assert decode.attributes[names.ATTR_NUM_PREEMPTIONS] == 1


async def test_a_wait_that_an_abort_ends_is_explained_too() -> None:
    story = TracedStory(num_blocks=4)
    story.arrive("a", prompt(8), max_tokens=4)
    victim = story.arrive("b", prompt(4, 500))
    waiter = story.arrive("c", prompt(4, 700))
    await story.watched_step()
    await story.watched_step()
    for request in (victim, waiter):
        story.scheduler.abort(request)
    story.tracer.ended([victim, waiter])
    queue = story.span(names.SPAN_REQUEST_QUEUE, "c")
    assert events(queue) == [("waiting", {"step": 0, "wait_reason": "no_blocks"})]
    assert queue.attributes[names.ATTR_FINISH_REASON] == "abort"
    decode = story.span(names.SPAN_REQUEST_DECODE, "b")
    assert [name for name, _ in events(decode)] == ["preempted", "waiting"]
    assert decode.attributes[f"{names.ATTR_WAIT_STEPS}.no_blocks"] == 1


async def test_what_an_operator_preempts_is_steps_and_reasons() -> None:
    story = TracedStory()
    story.arrive("a", prompt(6), max_tokens=4)
    await story.watched_step()
    story.tracer.preempted(story.scheduler.preempt_all())
    while story.scheduler.has_work:
        await story.watched_step()
    decode = story.span(names.SPAN_REQUEST_DECODE, "a")
    assert events(decode) == [("preempted", {}), ("resumed", {"step": 1})]


async def num_calls_of_a_step(num_waiting: int) -> int:
    """Calls within the scheduler that it takes to plan and observe a step like any other."""
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
