"""Traces of steps and requests, from the calls of the engine to its observer.

A step is a trace of its own, linked to the sampled requests it serves. A sampled request gets, in
its own trace, spans for the time it queued, the chunks of its prompt, and its decoding. The span in
which it waits, the first or one after a preemption, has an event at each change of the reason, and
as attributes the number of steps in which it was not admitted, by reason. See `wait_reasons`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from services.common import names
from services.common.telemetry import Attributes, Tracing, parse_traceparent, traceparent_of
from services.scheduler.adapters.statistics import StepCounts
from services.scheduler.adapters.wait_reasons import WaitStart
from services.scheduler.core.output import EngineCoreOutput, SchedulerOutput
from services.scheduler.core.request import Request


@dataclass(slots=True)
class _StepTrace:
    span: Span
    begun_nanos: int
    num_tokens: int = 0


@dataclass(slots=True)
class _RequestTrace:
    """The current span of a request: of its prompt, then of its decoding."""

    span: Span
    is_decoding: bool = False


class StepTracer:
    """A `StepObserver` that counts every step and traces those that are sampled."""

    def __init__(self, tracing: Tracing, counts: StepCounts) -> None:
        self._tracing = tracing
        self._counts = counts
        self._begun: _StepTrace | None = None
        self._last_done_nanos = 0
        self._steps: dict[int, _StepTrace] = {}
        self._requests: dict[Request, _RequestTrace] = {}
        self._waiting: dict[Request, WaitStart] = {}

    def arrived(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.traceparent and self._tracing.enabled:
                self._begin_to_wait(request)

    def begin(self) -> str:
        self._begun = _StepTrace(self._tracing.start(names.SPAN_STEP), time.time_ns())
        return traceparent_of(self._begun.span)

    def planned(self, plan: SchedulerOutput) -> None:
        step, self._begun = self._begun, None
        if step is None:
            raise AssertionError("a step was planned that had not begun")
        if self._tracing.enabled:
            self._trace_plan(plan, step.span)
        step.num_tokens = plan.num_tokens
        self._count(plan, step.num_tokens)
        if plan.requests or plan.removed_rows:
            self._steps[plan.step] = step
        else:
            step.span.end()

    def done(self, plan: SchedulerOutput, updates: Iterable[EngineCoreOutput]) -> None:
        step = self._steps.pop(plan.step)
        now = time.time_ns()
        nanos = now - max(step.begun_nanos, self._last_done_nanos)
        self._counts.step_nanos.append(nanos)
        self._counts.step_costs.observe(len(plan.requests), step.num_tokens, nanos / 1e9)
        self._last_done_nanos = now
        step.span.end()
        for update in updates if self._requests else ():
            trace = self._requests.get(update.request)
            if trace is not None and update.request.is_finished:
                self._end(update.request)
            elif trace is not None and update.token_ids and not trace.is_decoding:
                trace.span.end()
                trace.span = self._tracing.child(
                    names.SPAN_REQUEST_DECODE, update.request.traceparent
                )
                trace.is_decoding = True

    def ended(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request in self._waiting and request not in self._requests:
                self._record_queue(request)
            self._end(request)

    def paused(self) -> None:
        self._counts.wait_reasons.paused()

    def resumed(self) -> None:
        self._counts.wait_reasons.resumed()

    def preempted(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._note_preemption(request, {})

    def lost(self, preempted: Sequence[Request]) -> None:
        open_steps = [*self._steps.values(), *filter(None, [self._begun])]
        self._steps.clear()
        self._begun = None
        for step in open_steps:
            step.span.end()
        self.preempted(preempted)

    def _count(self, plan: SchedulerOutput, num_tokens: int) -> None:
        counts = self._counts
        counts.num_steps += 1
        counts.num_scheduled_tokens += num_tokens
        counts.wait_reasons.planned(plan.step, plan.wait_reason)
        for preemption in plan.preemptions:
            counts.num_lost_tokens += preemption.num_lost_tokens
        for request in plan.new:
            counts.num_prompt_tokens += request.num_prompt_tokens
            cached = request.num_cached_tokens or 0  # also of the output that it arrived with
            counts.num_cached_tokens += min(cached, request.num_prompt_tokens)

    def _trace_plan(self, plan: SchedulerOutput, span: Span) -> None:
        for request in plan.new:
            if request in self._waiting:
                self._leave_queue(request)
        for request in plan.resumed:
            if request in self._requests:
                self._note_resumption(request, plan.step)
            elif request in self._waiting:  # it was admitted in a step that was lost
                self._leave_queue(request)
        for preemption in plan.preemptions:
            attributes: Attributes = {
                names.ATTR_STEP: plan.step,
                names.ATTR_PREEMPTED_FOR: preemption.cause.request_id,
                names.ATTR_NUM_LOST_TOKENS: preemption.num_lost_tokens,
            }
            self._note_preemption(preemption.victim, attributes)
        if not span.is_recording():
            return
        for request in plan.requests:
            linked = parse_traceparent(request.traceparent)
            if linked is not None:
                span.add_link(linked)
        span.set_attributes(
            {
                names.ATTR_STEP: plan.step,
                names.ATTR_NUM_REQUESTS: len(plan.requests),
                names.ATTR_NUM_SCHEDULED_TOKENS: plan.num_tokens,
                names.ATTR_NUM_PREEMPTIONS: len(plan.preemptions),
                names.ATTR_WAIT_REASON: plan.wait_reason.value if plan.wait_reason else "",
            }
        )

    def _record_queue(self, request: Request) -> None:
        queued = self._tracing.child(
            names.SPAN_REQUEST_QUEUE,
            request.traceparent,
            attributes={
                names.ATTR_REQUEST_ID: request.request_id,
                # Those with which it came from a replica that was lost.
                names.ATTR_NUM_OUTPUT_TOKENS: request.num_output_tokens,
            },
            start_unix_nanos=request.queued_unix_nanos,
        )
        if request.finish_reason is not None:
            queued.set_attribute(names.ATTR_FINISH_REASON, request.finish_reason.value)
        queued.set_attributes(self._explain_wait(request, queued))
        queued.end()

    def _leave_queue(self, request: Request) -> None:
        self._record_queue(request)
        prefill = self._tracing.child(
            names.SPAN_REQUEST_PREFILL,
            request.traceparent,
            attributes={
                names.ATTR_NUM_PROMPT_TOKENS: request.num_prompt_tokens,
                names.ATTR_NUM_CACHED_TOKENS: request.num_cached_tokens or 0,
            },
        )
        self._requests[request] = _RequestTrace(prefill)

    def _begin_to_wait(self, request: Request) -> None:
        self._waiting[request] = self._counts.wait_reasons.begin()

    def _explain_wait(self, request: Request, span: Span) -> Attributes:
        """Adds an event for each wait reason; returns in how many steps each applied."""
        waiting, reasons = self._waiting.pop(request), self._counts.wait_reasons
        for change in reasons.changes_since(waiting):
            span.add_event(
                names.EVENT_WAITING,
                {names.ATTR_STEP: change.step, names.ATTR_WAIT_REASON: change.reason.value},
                change.unix_nanos,
            )
        return {
            f"{names.ATTR_WAIT_STEPS}.{reason.value}": steps
            for reason, steps in reasons.steps_since(waiting).items()
        }

    def _note_preemption(self, request: Request, attributes: Attributes) -> None:
        trace = self._requests.get(request)
        if trace is not None:
            trace.span.add_event(names.EVENT_PREEMPTED, attributes)
            self._begin_to_wait(request)

    def _note_resumption(self, request: Request, step: int) -> None:
        span = self._requests[request].span
        passed_over = self._explain_wait(request, span)
        span.add_event(names.EVENT_RESUMED, {names.ATTR_STEP: step, **passed_over})

    def _end(self, request: Request) -> None:
        trace = self._requests.pop(request, None)
        if trace is not None and request in self._waiting:
            trace.span.set_attributes(self._explain_wait(request, trace.span))
        if trace is not None and request.finish_reason is not None:
            trace.span.set_attributes(
                {
                    names.ATTR_FINISH_REASON: request.finish_reason.value,
                    names.ATTR_NUM_OUTPUT_TOKENS: request.num_output_tokens,
                    names.ATTR_NUM_PREEMPTIONS: request.num_preemptions,
                }
            )
            trace.span.end()
