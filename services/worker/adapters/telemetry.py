"""Spans of steps and of requests. Without sampling, a step costs a comparison or two."""

from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind
from stepwell.worker.v1 import worker_pb2

from services.common import names
from services.common.telemetry import Tracing
from services.worker.core.step import StepInput, StepOutput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step arrived, and when it ran, in nanoseconds since the epoch."""

    arrived_unix_nanos: int
    started_unix_nanos: int
    ended_unix_nanos: int


@dataclass(slots=True)
class _Phase:
    """A span over the steps of one request's prefill or decode."""

    span: Span
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    ended_unix_nanos: int = 0

    def count(self, scheduled: int, sampled: int, ended_unix_nanos: int) -> None:
        self.num_steps += 1
        self.num_scheduled_tokens += scheduled
        self.num_output_tokens += sampled
        self.ended_unix_nanos = ended_unix_nanos

    def end(self) -> None:
        self.span.set_attributes(
            {
                names.ATTR_NUM_STEPS: self.num_steps,
                names.ATTR_NUM_SCHEDULED_TOKENS: self.num_scheduled_tokens,
                names.ATTR_NUM_OUTPUT_TOKENS: self.num_output_tokens,
            }
        )
        self.span.end(self.ended_unix_nanos or None)


@dataclass(slots=True)
class _RequestTrace:
    traceparent: str
    prefill: _Phase | None = None
    decode: _Phase | None = None

    def end(self) -> None:
        for phase in (self.prefill, self.decode):
            if phase is not None:
                phase.end()


class StepTracer:
    """Turns steps of one stream into spans.

    A traced step is a span `worker.execute`. A traced request is a span `worker.prefill`, from its
    first chunk to its first token, and a span `worker.decode`, from then to its removal.
    """

    def __init__(self, tracing: Tracing, rank: int) -> None:
        self._tracing = tracing
        self._rank = rank
        self._requests: dict[int, _RequestTrace] = {}

    def record(
        self,
        message: worker_pb2.ExecuteRequest,
        step: StepInput,
        output: StepOutput,
        times: StepTimes,
    ) -> None:
        """Records a step that was run."""
        if not self._tracing.enabled:
            return
        if message.traceparent:
            self._record_step(message, step, times)
        if self._requests:
            for row in step.removed_rows.tolist():
                self._end_request(row)
        for request in message.new_requests:
            if request.traceparent:
                self._requests[request.row] = _RequestTrace(request.traceparent)
        if self._requests:
            self._record_requests(step, output, times)

    def close(self) -> None:
        """Ends the spans that are open."""
        for row in list(self._requests):
            self._end_request(row)

    def _record_step(
        self, message: worker_pb2.ExecuteRequest, step: StepInput, times: StepTimes
    ) -> None:
        span = self._tracing.child(
            names.SPAN_WORKER_EXECUTE,
            message.traceparent,
            kind=SpanKind.SERVER,
            attributes={
                names.ATTR_STEP: step.step,
                names.ATTR_GENERATION: step.generation,
                names.ATTR_RANK: self._rank,
                names.ATTR_NUM_REQUESTS: len(step.rows),
                names.ATTR_NUM_SCHEDULED_TOKENS: int(step.num_scheduled_tokens.sum()),
            },
            start_unix_nanos=times.arrived_unix_nanos,
        )
        span.add_event("started", timestamp=times.started_unix_nanos)
        span.end(times.ended_unix_nanos)

    def _record_requests(self, step: StepInput, output: StepOutput, times: StepTimes) -> None:
        columns = (
            step.rows.tolist(),
            step.num_scheduled_tokens.tolist(),
            step.num_computed_tokens.tolist(),
            output.num_tokens.tolist(),
        )
        for row, scheduled, computed, sampled in zip(*columns, strict=True):
            request = self._requests.get(row)
            if request is None:
                continue
            if request.decode is not None:
                request.decode.count(scheduled, sampled, times.ended_unix_nanos)
                continue
            if request.prefill is None:
                request.prefill = self._phase(names.SPAN_WORKER_PREFILL, request, times)
                request.prefill.span.set_attribute(names.ATTR_NUM_CACHED_TOKENS, computed)
            elif request.prefill.num_output_tokens:
                request.decode = self._phase(names.SPAN_WORKER_DECODE, request, times)
                request.decode.count(scheduled, sampled, times.ended_unix_nanos)
                continue
            request.prefill.count(scheduled, sampled, times.ended_unix_nanos)

    def _phase(self, name: str, request: _RequestTrace, times: StepTimes) -> _Phase:
        return _Phase(
            self._tracing.child(
                name,
                request.traceparent,
                attributes={names.ATTR_RANK: self._rank},
                start_unix_nanos=times.started_unix_nanos,
            )
        )

    def _end_request(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is not None:
            request.end()
