"""Records spans of steps. A step that is not sampled costs one or two comparisons."""

from dataclasses import dataclass

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind

from services.common.telemetry import names
from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Tracing
from services.worker.core.step import StepInput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step arrived, started and ended, in nanoseconds since the epoch."""

    arrived_unix_nanos: int
    started_unix_nanos: int
    ended_unix_nanos: int


class StepTracer:
    """Records a span `worker.execute` for each sampled step of a stream. `stage`: the worker's
    pipeline stage. It is None if there is one stage.
    """

    def __init__(self, tracing: Tracing, rank: int, stage: int | None = None) -> None:
        self._tracing = tracing
        self._place = {names.ATTR_RANK: rank}
        if stage is not None:
            self._place[names.ATTR_PIPELINE_STAGE] = stage

    def record(self, traceparent: str, step: StepInput, times: StepTimes) -> None:
        """Records a step that was run. The time before its start is its wait for the previous step
        and for the previous pipeline stage.
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
