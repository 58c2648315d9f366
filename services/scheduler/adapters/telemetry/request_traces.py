"""Which requests are sampled, from the beginning or in the end, and their spans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.trace import Link, SpanContext

from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Tracing
from services.scheduler.adapters.telemetry.kept_traces import KeptTrace, KeptTraces
from services.scheduler.adapters.telemetry.request_spans import (
    RequestSpans,
    StepLinks,
    is_defect,
    request_attributes,
)
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.timeline import Timeline


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A request whose spans are recorded when it ends."""

    context: SpanContext
    parent: SpanContext
    link: Link


class RequestTraces:
    """The requests of a replica as far as they are traced."""

    def __init__(self, tracing: Tracing, step_link: StepLinks) -> None:
        self._step_link = step_link
        self._is_enabled = tracing.enabled
        self._spans = RequestSpans(tracing, step_link)
        self._sampled: dict[Request, _Sampled] = {}
        self._kept = KeptTraces()

    def has_any_of(self, candidates: Callable[[], Iterable[Request]]) -> bool:
        """Whether a sampled request runs, or is among these."""
        sampled = self._sampled
        return bool(sampled) and (
            any(request.row is not None for request in sampled)
            or any(request in sampled for request in candidates())
        )

    def arrived(self, request: Request) -> None:
        """Notes whether a request is sampled from the beginning."""
        if self._is_enabled and request.traceparent:
            self._sample(request, sampled_parent(request.traceparent, request.tracestate))

    def links(self, requests: Iterable[Request]) -> list[Link]:
        """Links to the sampled ones of these."""
        sampled = self._sampled
        return [sampled[request].link for request in requests if request in sampled]

    def ended(self, request: Request, timeline: Timeline) -> None:
        """Records the spans of a request, or keeps its timeline for a while."""
        if not self._is_enabled:
            return
        attributes, failed = request_attributes(request), is_defect(request)
        sampled = self._sampled.pop(request, None)
        if sampled is None:
            self._kept.add(request.request_id, KeptTrace(timeline, attributes, failed))
        else:
            self._spans.record(timeline, attributes, sampled.context, sampled.parent, failed=failed)

    def end_turn(self, session: Request, turn: Request) -> None:
        """What is known of a session is of its turn that ended, as which it ends."""
        if (sampled := self._sampled.pop(session, None)) is not None:
            self._sampled[turn] = sampled

    def keep(self, request_id: str, parent: SpanContext, unfinished: Iterable[Request]) -> None:
        """Records the spans of a request that was not sampled; of one that has not ended, when it
        has.
        """
        if not self._is_enabled:
            return
        for request in unfinished:
            if request.request_id == request_id and request not in self._sampled:
                self._sample(request, parent)
                return
        trace = self._kept.take(request_id)
        if trace is not None:
            self._spans.record(
                trace.timeline, trace.attributes, child_of(parent), parent, failed=trace.failed
            )

    def so_far(
        self, request: Request, timeline: Timeline, parent: SpanContext, tracing: Tracing
    ) -> None:
        """Records the spans of a request that runs, with another tracing; below `parent`, unless it
        is sampled.
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
