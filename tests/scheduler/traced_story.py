"""Worked examples of traced scheduling, with a clock that the test advances."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.telemetry.tracing import configure_tracing
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from tests.scheduler.seen_spans import Seen, seen
from tests.scheduler.story import Story

SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Bar:
    """A span as a bar in a waterfall chart: its start and end in seconds, and its child spans."""

    name: str
    start: float
    end: float
    parts: tuple["Bar", ...] = ()


class TracedStory(Story):
    """A Story (a scheduler and pool whose steps are recorded) whose steps a `StepTracer` observes.
    Planning takes no time. A step takes one second by default, and the workers compute for nine
    tenths of it.
    """

    def __init__(
        self, step_sample_ratio: float = 1.0, draw: Callable[[], float] = lambda: 0.0, **config: Any
    ) -> None:
        super().__init__(**config)
        self.now = 0
        self.exporter = InMemorySpanExporter()
        self.counts = StepCounts()
        tracing = configure_tracing("scheduler", "", 0.0, exporter=self.exporter)
        self.tracer = StepTracer(
            tracing,
            self.counts,
            lambda: self.scheduler.next_candidates,
            lambda _step, _error: None,
            lambda: self.now,
            step_sample_ratio,
            draw,
        )

    def arrive(
        self, name: str, token_ids: list[int], *, sampled: bool = True, **fields: Any
    ) -> Request:
        """Adds a request. Its trace id is `trace_id_of(name)`."""
        traceparent = f"00-{trace_id_of(name):032x}-{1:016x}-01" if sampled else ""
        request = self.add(name, token_ids, traceparent=traceparent, **fields)
        request.queued_unix_nanos = self.now
        self.tracer.arrived([request])
        return request

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    async def plan(self) -> SchedulerOutput:
        traceparent = self.tracer.begin()
        plan = await self.scheduler.schedule(traceparent)
        self.tracer.planned(plan)
        return plan

    def complete(self, plan: SchedulerOutput) -> None:
        self.wait(1)
        output = self.model.run_plan(plan)
        timed = ModelRunnerOutput(output.token_ids, execute_nanos=round(0.9 * SECOND))
        update = self.scheduler.update_from_output(plan, timed)
        if plan.requests or plan.removed_rows:
            self.tracer.done(plan, update)

    async def watched_step(self) -> SchedulerOutput:
        plan = await self.plan()
        self.complete(plan)
        return plan

    async def to_the_end(self) -> None:
        while self.scheduler.requests:
            await self.watched_step()

    def spans(self, request: str | None = None) -> list[Seen]:
        """The spans recorded so far, of one request or of all requests."""
        found = seen(self.exporter.get_finished_spans())
        wanted = None if request is None else trace_id_of(request)
        return [span for span in found if wanted is None or span.trace_id == wanted]

    def span(self, name: str, request: str) -> Seen:
        """The only span of a request with this name."""
        (span,) = [span for span in self.spans(request) if span.name == name]
        return span

    def waterfall(self, request: str) -> Bar:
        spans = self.spans(request)
        (root,) = [span for span in spans if span.parent == 1]
        return bar_of(root, spans)


def trace_id_of(name: str) -> int:
    return int.from_bytes(b"trace" + name.encode()[:8], "big")


def bar_of(span: Seen, spans: Sequence[Seen]) -> Bar:
    parts = [bar_of(part, spans) for part in spans if part.parent == span.span_id]
    start, end = span.start_unix_nanos / SECOND, span.end_unix_nanos / SECOND
    return Bar(span.name, start, end, tuple(parts))
