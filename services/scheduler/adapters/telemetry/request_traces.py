"""Decides which requests are sampled, at their arrival or later, and records their spans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.trace import Link, SpanContext

from services.common.recent import Recent
from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Tracing
from services.scheduler.adapters.telemetry.request_spans import (
    Attributes,
    RequestSpans,
    StepLinks,
    is_defect,
    request_attributes,
)
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.timeline import Timeline

_MAX_KEPT = 2048
"""Limit on the number of stored timelines, which take some kilobytes each."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The data from which the spans of an ended request can still be created."""

    timeline: Timeline
    attributes: Attributes
    failed: bool


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A request whose spans are recorded when it ends."""

    context: SpanContext
    parent: SpanContext
    link: Link


class RequestTraces:
    def __init__(self, tracing: Tracing, step_link: StepLinks) -> None:
        self._step_link = step_link
        self._is_enabled = tracing.enabled
        self._spans = RequestSpans(tracing, step_link)
        self._sampled: dict[Request, _Sampled] = {}
        self._kept: Recent[str, _Kept] = Recent(_MAX_KEPT)
        """Maps the ids of requests that ended recently, and were not sampled, to their data."""

    def has_any_of(self, candidates: Callable[[], Iterable[Request]]) -> bool:
        """Whether a sampled request runs or is among `candidates`."""
        sampled = self._sampled
        return bool(sampled) and (
            any(request.row is not None for request in sampled)
            or any(request in sampled for request in candidates())
        )

    def arrived(self, request: Request) -> None:
        """Decides at a request's arrival whether it is sampled."""
        if self._is_enabled and request.traceparent:
            self._sample(request, sampled_parent(request.traceparent, request.tracestate))

    def links(self, requests: Iterable[Request]) -> list[Link]:
        sampled = self._sampled
        return [sampled[request].link for request in requests if request in sampled]

    def ended(self, request: Request, timeline: Timeline) -> None:
        """Records the spans of a sampled request, or stores the timeline of another request."""
        if not self._is_enabled:
            return
        attributes, failed = request_attributes(request), is_defect(request)
        sampled = self._sampled.pop(request, None)
        if sampled is None:
            self._kept[request.request_id] = _Kept(timeline, attributes, failed)
        else:
            self._spans.record(
                timeline,
                attributes,
                sampled.context,
                sampled.parent,
                failed=failed,
                links=_turn_before(request),
            )

    def finish_turn(self, session: Request, turn: Request) -> None:
        """Transfers the span of a sampled session (with several turns) to its ended turn."""
        if (sampled := self._sampled.pop(session, None)) is not None:
            self._sampled[turn] = sampled

    def keep(self, request_id: str, parent: SpanContext, unfinished: Iterable[Request]) -> None:
        """Samples a request after its arrival. If it has ended, records its spans at once."""
        if not self._is_enabled:
            return
        for request in unfinished:
            if request.request_id == request_id and request not in self._sampled:
                self._sample(request, parent)
                return
        trace = self._kept.pop(request_id, None)
        if trace is not None:
            self._spans.record(
                trace.timeline, trace.attributes, child_of(parent), parent, failed=trace.failed
            )

    def so_far(
        self, request: Request, timeline: Timeline, parent: SpanContext, tracing: Tracing
    ) -> None:
        """Records the spans of an unfinished request with `tracing`. Their parent is the span under
        which the request was sampled, or `parent` if it is not sampled.
        """
        sampled = self._sampled.get(request)
        context = child_of(parent) if sampled is None else sampled.context
        RequestSpans(tracing, self._step_link).record(
            timeline,
            request_attributes(request),
            context,
            parent if sampled is None else sampled.parent,
            is_running=True,
        )

    def _sample(self, request: Request, parent: SpanContext | None) -> None:
        if parent is not None:
            context = child_of(parent)
            self._sampled[request] = _Sampled(context, parent, Link(context))


def _turn_before(request: Request) -> list[Link]:
    """A link to the previous turn (request) of the request's program, if that turn was traced."""
    turn = request.program_turn
    before = None if turn is None else sampled_parent(turn.traceparent_before, "")
    return [] if before is None else [Link(before)]
