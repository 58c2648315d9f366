"""Records tracing spans of steps. Without sampling, a step costs one or two comparisons."""

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind

from services.common.telemetry import names
from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Tracing
from services.worker.core.step import StepInput


class StepTracer:
    """Records a span `worker.execute` for each step that is sampled for tracing. `stage` is the
    worker's pipeline stage, or None if there is only one stage.
    """

    def __init__(self, tracing: Tracing, rank: int, stage: int | None = None) -> None:
        self._tracing = tracing
        self._place = {names.ATTR_RANK: rank}
        if stage is not None:
            self._place[names.ATTR_PIPELINE_STAGE] = stage

    def record(self, traceparent: str, step: StepInput, times: tuple[int, int, int]) -> None:
        """Records the span of a completed step. `times` are its arrival, start and end in
        nanoseconds since the epoch. Between arrival and start, a step waits for the previous step
        and for the previous pipeline stage.
        """
        if not traceparent or not self._tracing.enabled:
            return
        parent, (arrived, started, ended) = sampled_parent(traceparent), times
        if parent is None:
            return
        self._tracing.record(
            names.SPAN_WORKER_EXECUTE,
            child_of(parent),
            parent,
            arrived,
            ended,
            kind=SpanKind.SERVER,
            attributes={
                names.ATTR_STEP: step.step,
                names.ATTR_GENERATION: step.generation,
                **self._place,
                names.ATTR_NUM_REQUESTS: len(step.rows),
                names.ATTR_NUM_SCHEDULED_TOKENS: int(step.num_scheduled_tokens.sum()),
            },
            events=(Event(names.EVENT_STARTED, timestamp=started),),
        )
