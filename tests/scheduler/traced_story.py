"""Stories whose steps the tracer watches, on a clock that only the test moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.telemetry.tracing import configure_tracing
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from tests.scheduler.span_collector import Seen, seen
from tests.scheduler.story import Story

SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Bar:
    """A span as a waterfall shows it: from when to when, in seconds, and what is in it."""

    name: str
    start: float
    end: float
    parts: tuple["Bar", ...] = ()


class TracedStory(Story):
    """A story on a clock of its own. Planning takes no time, and a step one second unless it is
    told otherwise, of which the workers compute nine tenths.
    """

    def __init__(
        self,
        step_sample_ratio: float = 1.0,
        draw: Callable[[], float] = lambda: 0.0,
        **config: Any,
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
        """Adds a request whose trace is `trace_id_of` its name."""
        traceparent = f"00-{trace_id_of(name):032x}-{1:016x}-01" if sampled else ""
        request = self.add(name, token_ids, traceparent=traceparent, **fields)
        request.queued_unix_nanos = self.now
        self.tracer.arrived([request])
        return request

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += round(seconds * SECOND)

    async def plan(self) -> SchedulerOutput:
        """Plans a step, and leaves it in flight."""
        traceparent = self.tracer.begin()
        plan = await self.scheduler.schedule(traceparent)
        self.tracer.planned(plan)
        return plan

    def complete(self, plan: SchedulerOutput, seconds: float = 1.0) -> None:
        """Lets a step take its time, and takes in its tokens."""
        self.wait(seconds)
        output = self.model.run_plan(plan)
        timed = ModelRunnerOutput(output.token_ids, execute_nanos=round(0.9 * seconds * SECOND))
        update = self.scheduler.update_from_output(plan, timed)
        if plan.requests or plan.removed_rows:
            self.tracer.done(plan, update)

    async def watched_step(self, seconds: float = 1.0) -> SchedulerOutput:
        """Plans a step and completes it."""
        plan = await self.plan()
        self.complete(plan, seconds)
        return plan

    async def to_the_end(self) -> None:
        """Runs steps until no request is left."""
        while self.scheduler.requests:
            await self.watched_step()

    def spans(self, request: str | None = None) -> list[Seen]:
        """What was recorded so far, of one request or of everything."""
        found = seen(self.exporter.get_finished_spans())
        wanted = None if request is None else trace_id_of(request)
        return [span for span in found if wanted is None or span.trace_id == wanted]

    def span(self, name: str, request: str) -> Seen:
        """The one span of this name."""
        (span,) = [span for span in self.spans(request) if span.name == name]
        return span

    def waterfall(self, request: str) -> Bar:
        """The spans of a request as one tree."""
        spans = self.spans(request)
        (root,) = [span for span in spans if span.parent == 1]
        return bar_of(root, spans)


def trace_id_of(name: str) -> int:
    """Another one for each name."""
    return int.from_bytes(b"trace" + name.encode()[:8], "big")


def bar_of(span: Seen, spans: Sequence[Seen]) -> Bar:
    """A span and what is below it."""
    parts = [bar_of(part, spans) for part in spans if part.parent == span.span_id]
    start, end = span.start_unix_nanos / SECOND, span.end_unix_nanos / SECOND
    return Bar(span.name, start, end, tuple(parts))
