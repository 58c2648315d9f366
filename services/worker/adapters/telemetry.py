"""Spans of steps. Without sampling, a step costs a comparison or two."""

from dataclasses import dataclass

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind

from services.common.telemetry import names
from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Tracing
from services.worker.core.step import StepInput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step arrived, and when it ran, in nanoseconds since the epoch."""

    arrived_unix_nanos: int
    started_unix_nanos: int
    ended_unix_nanos: int


class StepTracer:
    """Turns sampled steps of one stream into spans `worker.execute`. `stage`: the worker's pipeline
    stage; None if there is one stage.
    """

    def __init__(self, tracing: Tracing, rank: int, stage: int | None = None) -> None:
        self._tracing = tracing
        self._place = {names.ATTR_RANK: rank}
        if stage is not None:
            self._place[names.ATTR_PIPELINE_STAGE] = stage

    def record(self, traceparent: str, step: StepInput, times: StepTimes) -> None:
        """Records a step that was run; until it was started it waited for the one before, and for
        the pipeline stage before.
        """
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
                **self._place,
                names.ATTR_NUM_REQUESTS: len(step.rows),
                names.ATTR_NUM_SCHEDULED_TOKENS: int(step.num_scheduled_tokens.sum()),
            },
            events=(Event(names.EVENT_STARTED, timestamp=times.started_unix_nanos),),
        )
