"""Counts and traces steps and requests, when the engine calls its observer.

Every request has a timeline (`request_timelines`). When a sampled request ends, its timeline is
converted to spans (`request_spans`).

A step is a candidate for sampling if a sampled request runs or may be admitted in the step. Other
steps become candidates at random, with the sample ratio of traces. The sample ratio of steps then
decides which candidates are sampled.

Most steps only decode. Decode-only steps are collected and counted together, before any other event
is counted. So up to MAX_UNCOUNTED_STEPS recent steps may be missing from the counts.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.trace import Link

from services.common.recent import Recent
from services.common.telemetry.trace_context import sampled_parent, traceparent_text
from services.common.telemetry.tracing import Tracing
from services.scheduler.adapters.telemetry.request_timelines import RequestTimelines, StepRecord
from services.scheduler.adapters.telemetry.request_traces import RequestTraces
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.adapters.telemetry.step_spans import StepSpan
from services.scheduler.core.output import EngineCoreOutputs, PreemptionCause, SchedulerOutput
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.core.request import Request, TurnEnd

STEP_SERVICE = "engine-steps"
"""The service name of step traces contains this, to distinguish them from request traces."""
_MAX_STEP_LINKS = 8192
"""Number of recent sampled steps to which requests that end later can link."""
MAX_UNCOUNTED_STEPS = 32
MAX_UNCOUNTED_NANOS = 100_000_000
"""Limit on the time from the first to the last step that is not counted yet."""


class StepTracer:
    """A `StepObserver` that counts and times all steps and requests, and traces sampled ones.
    `candidates` returns the waiting requests that the next step may admit. `end_execution` records
    the span of the workers' execution of a step, if it was not recorded yet. Its second argument is
    an error, or None if the workers replied.
    """

    def __init__(
        self,
        tracing: Tracing,
        counts: StepCounts,
        candidates: Callable[[], Iterable[Request]],
        end_execution: Callable[[int, str | None], None],
        unix_nanos: Callable[[], int] = time.time_ns,
        step_sample_ratio: float = 1.0,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._tracing = tracing.of(STEP_SERVICE)
        self._step_sample_ratio = step_sample_ratio
        self._draw = draw
        self._counts = counts
        self._candidates = candidates
        self._end_execution = end_execution
        self._unix_nanos = unix_nanos
        self._timelines = RequestTimelines(counts.wait_reasons, counts.wait_nanos)
        self._step_links: Recent[int, Link] = Recent(_MAX_STEP_LINKS)
        self._traces = RequestTraces(tracing, self._step_links.get)
        self._begun: StepRecord | None = None
        self._steps: dict[int, StepRecord] = {}
        self._uncounted: list[StepRecord] = []
        """Decode-only steps that ended no request and are not counted yet."""

    def arrived(self, requests: Sequence[Request]) -> None:
        now = self._unix_nanos()
        for request in requests:
            self._timelines.arrived(request, now)
            self._traces.arrived(request)

    def begin(self) -> str:
        now, context = self._unix_nanos(), None
        if self._tracing.enabled and self._draw() < self._step_sample_ratio:
            is_sampled = self._traces.has_any_of(self._candidates)
            context = self._tracing.draw_root(is_sampled=is_sampled)
        self._begun = StepRecord(now, None if context is None else StepSpan(context, now))
        return "" if context is None else traceparent_text(context.trace_id, context.span_id)

    def planned(self, plan: SchedulerOutput) -> None:
        step, self._begun = self._begun, None
        if step is None:
            raise AssertionError("a step was planned that had not begun")
        now = self._unix_nanos()
        step.number, step.num_requests = plan.step, len(plan.requests)
        step.num_tokens = plan.num_tokens
        step.only_decodes = step.span is None and self._timelines.only_decodes(plan)
        if not step.only_decodes:
            self._count_done_steps()
            self._timelines.planned(plan, step, now)
            self._count_admissions(plan)
        counts = self._counts
        counts.num_steps += 1
        counts.num_scheduled_tokens += step.num_tokens
        counts.wait_reasons.planned(plan, now)
        if plan.passed_over or counts.wait_reasons.passed_over:
            counts.wait_reasons.passed_over = Counter(plan.passed_over.values())
        if step.span is not None:
            step.span.planned(plan, self._traces.links(plan.requests))
            if plan.requests:
                self._step_links[plan.step] = Link(step.span.context)
        if plan.is_sent:
            self._steps[plan.step] = step
        elif step.span is not None:
            step.span.record(self._tracing, now)

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        step, now = self._steps.pop(plan.step, None), self._unix_nanos()
        if step is None:
            return  # a step without requests, which only reported KV transfers
        if step.only_decodes and not (update.ended or update.turns):
            step.done, step.compute_nanos = now, update.execute_nanos
            uncounted = self._uncounted
            uncounted.append(step)
            num_nanos = now - uncounted[0].done
            if len(uncounted) >= MAX_UNCOUNTED_STEPS or num_nanos >= MAX_UNCOUNTED_NANOS:
                self._count_done_steps()
            return
        self._count_done_steps()
        ended = self._timelines.done(plan, step, update, now)
        self._count_done(step)
        for tracked in ended:
            self._traces.ended(tracked.request, tracked.timeline)
        if update.turns:
            self._finish_turns(update.turns, now)
        if step.span is not None:
            self._end_execution(plan.step, None)
            if update.num_draft_tokens:
                step.span.verified(sum(update.num_draft_tokens), sum(update.num_accepted))
            step.span.record(self._tracing, self._unix_nanos())

    def _finish_turns(self, turns: Mapping[Request, TurnEnd], now: int) -> None:
        """Ends the timelines of turns of sessions (requests with several turns)."""
        for session, end in turns.items():
            self._traces.finish_turn(session, end.turn)
            tracked = self._timelines.finish_turn(session, end.turn, now)
            if tracked is not None:
                self._traces.ended(end.turn, tracked.timeline)

    def ended(self, requests: Iterable[Request]) -> None:
        now = self._unix_nanos()
        self._count_done_steps()
        for request in requests:
            tracked = self._timelines.end(request, now)
            if tracked is not None:
                self._traces.ended(request, tracked.timeline)

    def paused(self) -> None:
        now = self._unix_nanos()
        self._counts.wait_reasons.paused(now)
        self._timelines.paused(now)

    def resumed(self) -> None:
        self._count_done_steps()
        self._timelines.resumed(self._unix_nanos(), stood_still=not self._steps)
        self._counts.wait_reasons.resumed()

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        self._count_done_steps()
        self._timelines.preempted(requests, cause, self._unix_nanos())

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        now = self._unix_nanos()
        self._count_done_steps()
        self._drop_steps()
        self._counts.wait_reasons.lost(now)
        of_pool = isinstance(lost, PoolLost)
        cause = PreemptionCause.POOL_LOST if of_pool else PreemptionCause.WORKERS_LOST
        self._timelines.preempted(preempted, cause, now, lost.message)

    def recovered(self) -> None:
        self._counts.wait_reasons.recovered(self._unix_nanos())

    def stopped(self) -> None:
        self._drop_steps()
        self.ended(self._timelines.requests)

    def keep(self, request_id: str, traceparent: str, tracestate: str = "") -> None:
        """Samples a request after its arrival, if its timeline is still stored."""
        parent = sampled_parent(traceparent, tracestate)
        if parent is not None:
            self._traces.keep(request_id, parent, self._timelines.requests)

    def so_far(self, request_id: str, traceparent: str, tracing: Tracing) -> None:
        """Records the spans of an unfinished request up to now with `tracing`, under the span of
        `traceparent`. Does nothing if the request is unknown or `traceparent` is invalid.
        """
        parent = sampled_parent(traceparent)
        if parent is None:
            return
        self._count_done_steps()
        now = self._unix_nanos()
        for request in self._timelines.requests:
            if request.request_id == request_id:
                timeline = self._timelines.so_far(request, now)
                if timeline is not None:
                    self._traces.so_far(request, timeline, parent, tracing)
                return

    def _drop_steps(self) -> None:
        for number, step in self._steps.items():
            if step.span is not None:
                self._end_execution(number, "the step was lost")
        for step in (*self._steps.values(), *filter(None, [self._begun])):
            if step.span is not None:
                step.span.record(self._tracing, self._unix_nanos(), lost=True)
        self._steps.clear()
        self._begun = None

    def _count_done_steps(self) -> None:
        if self._uncounted:
            uncounted, self._uncounted = self._uncounted, []
            self._timelines.decoded(uncounted)
            for step in uncounted:
                self._count_done(step)

    def _count_done(self, step: StepRecord) -> None:
        counts, seconds = self._counts, step.nanos / 1e9
        counts.step_nanos.append(step.nanos)
        counts.step_seconds.observe(seconds)
        counts.step_costs.observe(step.num_requests, step.num_tokens, seconds)

    def _count_admissions(self, plan: SchedulerOutput) -> None:
        counts = self._counts
        for preemption in plan.preemptions:
            counts.num_lost_tokens += preemption.num_lost_tokens
        for request in plan.new:
            cached = request.num_cached_tokens or 0  # may include earlier output tokens
            num_prompt = request.num_prompt_tokens
            counts.admitted(num_prompt, min(cached, num_prompt))
