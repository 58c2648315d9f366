"""Spans of steps. Without sampling, a step costs a comparison or two."""

from dataclasses import dataclass

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind

from services.common import names
from services.common.telemetry import Tracing, child_of, sampled_parent
from services.worker.core.step import StepInput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step arrived, and when it ran, in nanoseconds since the epoch."""

    arrived_unix_nanos: int
    started_unix_nanos: int
    ended_unix_nanos: int


class StepTracer:
    """Turns sampled steps of one stream into spans `worker.execute`."""

    def __init__(self, tracing: Tracing, rank: int) -> None:
        self._tracing = tracing
        self._rank = rank

    def record(self, traceparent: str, step: StepInput, times: StepTimes) -> None:
        """Records a step that was run; until it was started it waited for the one before."""
        if not traceparent or not self._tracing.enabled:
            return
        parent = sampled_parent(traceparent)
        if parent is None:
            return
        self._tracing.record(
            names.SPAN_WORKER_EXECUTE,
            child_of(parent),
            parent,
            times.arrived_unix_nanos,
            times.ended_unix_nanos,
            kind=SpanKind.SERVER,
            attributes={
                names.ATTR_STEP: step.step,
                names.ATTR_GENERATION: step.generation,
                names.ATTR_RANK: self._rank,
                names.ATTR_NUM_REQUESTS: len(step.rows),
                names.ATTR_NUM_SCHEDULED_TOKENS: int(step.num_scheduled_tokens.sum()),
            },
            events=(Event(names.EVENT_STARTED, timestamp=times.started_unix_nanos),),
        )
