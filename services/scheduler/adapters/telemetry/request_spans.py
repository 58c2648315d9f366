"""Converts timelines of requests to spans. Each request, each phase of its timeline, and each part
of a phase (a wait or a prefill chunk) has a span. Child spans cover their parent without a gap, so
that durations add up. Spans are created when a request has ended, because only then their contents
are known. On demand, spans of a running request are created up to the present time.
"""

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.trace import Link, SpanContext, Status, StatusCode

from services.common.request.finish import FinishReason
from services.common.telemetry import names
from services.common.telemetry.time_parts import time_attributes
from services.common.telemetry.trace_context import child_of
from services.common.telemetry.trace_headers import baggage_attributes
from services.common.telemetry.tracing import Tracing
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.phase_parts import RETAINED, Chunk, Wait
from services.scheduler.core.timelines.timeline import Phase, PhaseKind, Timeline

MAX_STEP_LINKS = 128
"""Limit on the number of links from a phase to its steps, half of them to the first steps."""

Attributes = dict[str, str | int | float | bool | Sequence[str]]
StepLinks = Callable[[int], Link | None]
"""Returns a trace link to the step of this number. None if the step was not sampled."""

_NAMES = {
    PhaseKind.QUEUE: names.SPAN_REQUEST_QUEUE,
    PhaseKind.PREFILL: names.SPAN_REQUEST_PREFILL,
    PhaseKind.DECODE: names.SPAN_REQUEST_DECODE,
    PhaseKind.PREEMPTED: names.SPAN_REQUEST_PREEMPTED,
    PhaseKind.RECOVERY: names.SPAN_REQUEST_RECOVERY,
    PhaseKind.PAUSE: names.SPAN_REQUEST_PAUSE,
    PhaseKind.SEVERAL: names.SPAN_REQUEST_SEVERAL,
}
_DEFECTS = (
    FinishReason.NAN_IN_LOGITS,
    FinishReason.STEP_FAILED,
    FinishReason.KV_LOAD_FAILED,
    FinishReason.QUEUE_TIMEOUT,
    FinishReason.ERROR,
)


def request_attributes(request: Request) -> Attributes:
    """The attributes of a request's span, without the parts of the request's time."""
    attributes: Attributes = {
        names.ATTR_REQUEST_ID: request.request_id,
        names.ATTR_NUM_PROMPT_TOKENS: request.num_prompt_tokens,
        names.ATTR_NUM_OUTPUT_TOKENS: request.num_output_tokens,
        names.ATTR_NUM_PREEMPTIONS: request.num_preemptions,
        **baggage_attributes(request.baggage),
    }
    if request.num_cached_tokens is not None:
        attributes[names.ATTR_NUM_CACHED_TOKENS] = request.num_cached_tokens
    if request.turn_ended_unix_nanos:
        nanos = max(0, request.queued_unix_nanos - request.turn_ended_unix_nanos)
        attributes[names.ATTR_SESSION_WAIT_SECONDS] = nanos / 1e9
    if (turn := request.program_turn) is not None:
        attributes |= {names.ATTR_PROGRAM: turn.program, names.ATTR_TURN: turn.number}
        if turn.pause_seconds is not None:
            attributes |= {
                names.ATTR_TOOL: turn.tool,
                names.ATTR_PAUSE_SECONDS: turn.pause_seconds,
                names.ATTR_CONTEXT_TOKENS: turn.num_context_tokens,
                names.ATTR_RECOMPUTED_TOKENS: turn.num_recomputed_tokens,
            }
    if request.num_external_tokens:
        attributes[names.ATTR_NUM_EXTERNAL_TOKENS] = request.num_external_tokens
    if request.finish_reason is not None:
        attributes[names.ATTR_FINISH_REASON] = request.finish_reason.value
    if request.times is not None:
        queue, prefill, decode, interrupted = (nanos / 1e9 for nanos in request.times[:4])
        attributes |= {
            names.GENAI_LATENCY_QUEUE: queue,
            names.GENAI_LATENCY_PREFILL: prefill,
            names.GENAI_LATENCY_DECODE: decode,
            names.GENAI_LATENCY_INFERENCE: prefill + decode,
            names.ATTR_INTERRUPTED_SECONDS: interrupted,
        }
    return attributes


def is_defect(request: Request) -> bool:
    """Whether a request ended with an error that the client did not cause."""
    return request.finish_reason in _DEFECTS


class RequestSpans:
    """Records the spans of ended requests, and of running requests up to the present time."""

    def __init__(self, tracing: Tracing, step_link: StepLinks) -> None:
        self._tracing = tracing
        self._step_link = step_link

    def record(
        self,
        timeline: Timeline,
        attributes: Attributes,
        context: SpanContext,
        parent: SpanContext,
        *,
        failed: bool = False,
        is_running: bool = False,
        links: Sequence[Link] = (),
    ) -> None:
        """Records the span `scheduler.request` with `context`, under `parent`, and all its child
        spans. `is_running` becomes an attribute of this span and of the span of the last phase.
        """
        status = Status(StatusCode.ERROR) if failed else Status()
        end = timeline.current.end
        self._tracing.record(
            names.SPAN_REQUEST,
            context,
            parent,
            timeline.queued,
            end,
            attributes=attributes | time_attributes(timeline.times().parts) | _running(is_running),
            links=links,
            status=status,
        )
        has_run = False
        for phase in timeline.phases:
            marks = _running(is_running and phase is timeline.current)
            self._record_phase(phase, context, marks, is_again=has_run)
            has_run = has_run or phase.kind is PhaseKind.PREFILL

    def _record_phase(
        self, phase: Phase, parent: SpanContext, marks: Attributes, *, is_again: bool
    ) -> None:
        context = child_of(parent)
        attributes = _phase_attributes(phase) | marks
        if phase.kind is PhaseKind.PREFILL and is_again:
            attributes[names.ATTR_IS_RECOMPUTED] = True
        links: list[Link] = []
        if phase.kind is PhaseKind.DECODE and phase.last_step >= phase.first_step:
            links, num_left_out = self._links(range(phase.first_step, phase.last_step + 1))
            if num_left_out:
                attributes[names.ATTR_NUM_LINKS_LEFT_OUT] = num_left_out
        self._tracing.record(
            _NAMES[phase.kind],
            context,
            parent,
            phase.start,
            phase.end,
            attributes=attributes,
            links=links,
        )
        for part in phase.parts:
            if isinstance(part, Wait):
                self._record_wait(part, context)
            else:
                self._record_chunk(part, context)

    def _record_wait(self, wait: Wait, parent: SpanContext) -> None:
        reason = wait.reason
        attributes: Attributes = {names.ATTR_WAIT_REASON: reason}
        links: list[Link] = []
        if wait.holder:
            name = names.ATTR_RETAINED if reason == RETAINED else names.ATTR_WAITED_FOR
            attributes[name] = wait.holder
        if wait.step is not None:
            attributes[names.ATTR_STEP] = wait.step
            links, _ = self._links(range(wait.step, wait.step + 1))
        if len(wait.reasons) > 1:
            attributes |= {
                f"{names.ATTR_WAIT_SECONDS}.{name}": nanos / 1e9
                for name, nanos in wait.reasons.items()
            }
        self._tracing.record(
            f"wait.{reason}",
            child_of(parent),
            parent,
            wait.start,
            wait.end,
            attributes=attributes,
            links=links,
        )

    def _record_chunk(self, chunk: Chunk, parent: SpanContext) -> None:
        links, num_left_out = self._links(range(chunk.first_step, chunk.last_step + 1))
        attributes: Attributes = {
            names.ATTR_STEP: chunk.first_step,
            names.ATTR_NUM_SCHEDULED_TOKENS: chunk.num_tokens,
        }
        if chunk.num_steps:
            attributes |= {
                names.ATTR_NUM_STEP_TOKENS: chunk.num_step_tokens,
                names.ATTR_STEP_SHARE: chunk.num_tokens / max(1, chunk.num_step_tokens),
                names.ATTR_NUM_REQUESTS: chunk.num_requests,
                names.ATTR_COMPUTE_SECONDS: chunk.compute_nanos / 1e9,
            }
        else:
            attributes[names.ATTR_IS_CUT] = True
        if chunk.num_steps > 1:
            attributes |= {
                names.ATTR_LAST_STEP: chunk.last_step,
                names.ATTR_NUM_CHUNKS: chunk.num_steps,
                names.ATTR_STEP_AHEAD_SECONDS: chunk.wait_nanos / 1e9,
            }
        if num_left_out:
            attributes[names.ATTR_NUM_LINKS_LEFT_OUT] = num_left_out
        self._tracing.record(
            names.SPAN_PREFILL_CHUNK,
            child_of(parent),
            parent,
            chunk.start,
            chunk.end,
            attributes=attributes,
            links=links,
        )

    def _links(self, steps: range) -> tuple[list[Link], int]:
        """Links to at most MAX_STEP_LINKS steps, and the number of steps that were left out."""
        chosen: Iterable[int] = steps
        num_left_out = max(0, len(steps) - MAX_STEP_LINKS)
        if num_left_out:
            half = MAX_STEP_LINKS // 2
            chosen = (*steps[:half], *steps[-half:])
        found = map(self._step_link, chosen)
        return [link for link in found if link is not None], num_left_out


def _running(is_running: bool) -> Attributes:
    return {names.ATTR_IS_RUNNING: True} if is_running else {}


def _phase_attributes(phase: Phase) -> Attributes:
    attributes: Attributes = {}
    interruption = phase.interruption
    if interruption is not None:
        attributes |= {names.ATTR_CAUSE: interruption.cause}
        if interruption.step is not None:
            attributes |= {
                names.ATTR_STEP: interruption.step,
                names.ATTR_PREEMPTED_FOR: interruption.preempted_for,
                names.ATTR_NUM_LOST_TOKENS: interruption.num_lost_tokens,
            }
        if interruption.message:
            attributes[names.ATTR_CAUSE_MESSAGE] = interruption.message
    match phase.kind:
        case PhaseKind.QUEUE if phase.num_output_tokens:
            # Another replica had generated this output before it was lost.
            attributes[names.ATTR_NUM_OUTPUT_TOKENS] = phase.num_output_tokens
        case PhaseKind.DECODE:
            attributes |= _decode_attributes(phase)
        case PhaseKind.PREFILL:
            chunks = [part for part in phase.parts if isinstance(part, Chunk)]
            attributes |= {
                names.ATTR_FIRST_STEP: phase.first_step,
                names.ATTR_NUM_CHUNKS: sum(chunk.num_steps for chunk in chunks),
                names.ATTR_NUM_SCHEDULED_TOKENS: sum(chunk.num_tokens for chunk in chunks),
            }
        case PhaseKind.SEVERAL:
            attributes |= {
                f"{names.ATTR_SECONDS}.{kind.value}": nanos / 1e9
                for kind, nanos in (phase.merged or {}).items()
            }
    return attributes


def _decode_attributes(phase: Phase) -> Attributes:
    """The attributes of a decode phase. The four times in seconds add up to its duration."""
    own = phase.totals.minus(phase.behind)
    others_prefill, behind = own.prompt_nanos, phase.behind.nanos
    compute = own.compute_nanos - others_prefill
    overhead = max(0, phase.nanos - compute - others_prefill - behind)
    attributes: Attributes = {
        names.ATTR_FIRST_STEP: phase.first_step,
        names.ATTR_LAST_STEP: phase.last_step,
        names.ATTR_NUM_STEPS: own.num_steps,
        names.ATTR_NUM_OUTPUT_TOKENS: phase.num_output_tokens,
        names.ATTR_COMPUTE_SECONDS: compute / 1e9,
        names.ATTR_OTHERS_PREFILL_SECONDS: others_prefill / 1e9,
        names.ATTR_STEP_AHEAD_SECONDS: behind / 1e9,
        names.ATTR_OVERHEAD_SECONDS: overhead / 1e9,
        names.ATTR_MAX_NUM_REQUESTS: phase.max_requests,
    }
    if own.num_steps:
        attributes[names.ATTR_MEAN_NUM_REQUESTS] = own.num_requests / own.num_steps
    return attributes
