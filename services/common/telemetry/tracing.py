"""Tracing over OTLP if an endpoint is set. Otherwise nothing is traced. Sampling is parent-based.
The first service of a trace samples it at random, with a configured probability. Later services
follow the flag in the W3C `traceparent` of their messages. An unsampled trace context is sent as an
empty string, so that it costs later services one comparison.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import (
    Event,
    ReadableSpan,
    SpanLimits,
    SynchronousMultiSpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanContext, SpanKind, Status, TraceFlags

from services.common.process.service_settings import ServiceSettings
from services.common.telemetry.span_sender import SpanSender
from services.common.telemetry.trace_context import new_span_id, new_trace_id, parse_traceparent

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

_SCOPE = InstrumentationScope("stepwell")
_UNSET = Status()

MAX_LINKS = 1024
"""Limit on the links of a span. Further links are omitted, and an attribute counts them."""
_LIMITS = SpanLimits(
    max_span_attributes=128,
    max_events=128,
    max_links=MAX_LINKS,
    max_event_attributes=16,
    max_link_attributes=16,
    max_span_attribute_length=4096,
)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """The trace of a request, the caller's span, and whether the trace is sampled at its start."""

    trace_id: int
    parent: SpanContext | None
    is_sampled: bool

    @property
    def tracestate(self) -> str:
        """The caller's `tracestate`, which is sent to other services."""
        return "" if self.parent is None else self.parent.trace_state.to_header()

    def context(self, span_id: int) -> SpanContext:
        """The context of a sampled span of this trace."""
        state = None if self.parent is None else self.parent.trace_state
        return SpanContext(self.trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED), state)


@dataclass(frozen=True, slots=True)
class Tracing:
    """A service's tracer. Without a tracer provider, every span is INVALID_SPAN."""

    tracer: trace.Tracer
    provider: TracerProvider | None
    processor: SynchronousMultiSpanProcessor | None = None
    """Receives every ended span. Other processors may be added to it. None without a provider."""
    sample_ratio: float = 0.0
    root_sampler: Sampler | None = None
    """Decides which new traces are sampled. If it is None, `sample_ratio` decides."""
    senders: tuple[SpanSender, ...] = ()
    resource: Resource | None = None
    """The resource of spans that `record` creates. If None, it is the provider's resource."""

    @property
    def enabled(self) -> bool:
        return self.provider is not None

    def of(self, service: str) -> "Tracing":
        """Returns a copy whose method `record` records spans of another service."""
        return replace(self, resource=service_resource(service))

    def start(
        self,
        name: str,
        traceparent: str = "",
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        start_unix_nanos: int | None = None,
    ) -> Span:
        """Starts a child of the span in `traceparent`, or a new trace. The caller must end it."""
        if self.provider is None:
            return INVALID_SPAN
        parent = parse_traceparent(traceparent)
        context = otel_context.Context()
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent), context)
        return self.tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=start_unix_nanos
        )

    def draw_root(self, *, is_sampled: bool = False) -> SpanContext | None:
        """Returns the context of a new trace's first span, or None if the trace is not sampled."""
        if self.processor is None or not (is_sampled or self._is_drawn()):
            return None
        return SpanContext(new_trace_id(), new_span_id(), False, TraceFlags(TraceFlags.SAMPLED))

    def _is_drawn(self) -> bool:
        if self.root_sampler is None:
            return random.random() < self.sample_ratio
        result = self.root_sampler.should_sample(None, new_trace_id(), "")
        return result.decision is Decision.RECORD_AND_SAMPLE

    def origin(
        self, traceparent: str = "", tracestate: str = "", *, may_be_drawn: bool = True
    ) -> TraceOrigin:
        """Returns the trace of a request with these headers, or a new trace if `traceparent` is
        missing or malformed. The flag in `traceparent` decides whether the trace is sampled. For a
        new trace the sampler decides, or with `may_be_drawn=False` the trace is not sampled.
        """
        parent = parse_traceparent(traceparent, tracestate)
        if parent is not None:
            is_sampled = self.enabled and bool(parent.trace_flags & TraceFlags.SAMPLED)
            return TraceOrigin(parent.trace_id, parent, is_sampled)
        trace_id = new_trace_id()
        if self.provider is None or not may_be_drawn:
            return TraceOrigin(trace_id, None, False)
        drawn = self.provider.sampler.should_sample(None, trace_id, "")
        return TraceOrigin(trace_id, None, drawn.decision is Decision.RECORD_AND_SAMPLE)

    def record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_unix_nanos: int,
        end_unix_nanos: int,
        *,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
    ) -> None:
        """Records a span that has ended. The flags in `context` show whether it is sampled."""
        if self.provider is None or self.processor is None:
            return
        span = ReadableSpan(
            name,
            context,
            parent,
            self.resource or self.provider.resource,
            attributes,
            events,
            links,
            kind,
            status=status,
            start_time=start_unix_nanos,
            end_time=end_unix_nanos,
            instrumentation_scope=_SCOPE,
        )
        self.processor.on_end(span)

    def shutdown(self) -> None:
        """Sends remaining spans within half a second. Spans that are not accepted then are lost."""
        if self.provider is not None:
            self.provider.shutdown()


def configure_tracing(
    service: str,
    endpoint: str,
    sample_ratio: float,
    *,
    exporter: SpanExporter | None = None,
    root_sampler: Sampler | None = None,
) -> Tracing:
    """Creates the tracing of a service. `endpoint` is an OTLP/gRPC URL such as http://host:4317, a
    comma-separated list of such URLs, or empty. Every span is sent to all URLs. If given,
    `exporter` receives every span when it ends, and `root_sampler` replaces the ratio.
    """
    # This logger would log every invalid `tracestate` of a client.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    if not endpoint and exporter is None:
        return Tracing(trace.NoOpTracer(), None, sample_ratio=sample_ratio)
    processor = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    if exporter is not None:
        processor.add_span_processor(SimpleSpanProcessor(exporter))
    senders = tuple(SpanSender(_otlp_exporter(url)) for url in endpoint_urls(endpoint))
    for sender in senders:
        processor.add_span_processor(sender)
    provider = TracerProvider(
        resource=service_resource(service),
        sampler=ParentBased(root_sampler or TraceIdRatioBased(sample_ratio)),
        active_span_processor=processor,
        span_limits=_LIMITS,
    )
    tracer = provider.get_tracer("stepwell")
    return Tracing(tracer, provider, processor, sample_ratio, root_sampler, senders)


def endpoint_urls(endpoint: str) -> list[str]:
    """Splits a comma-separated list of OTLP URLs. Empty parts are ignored."""
    return [url for one in endpoint.split(",") if (url := one.strip())]


@cache
def service_resource(service: str) -> Resource:
    """The resource of a service's spans. The first call starts OpenTelemetry's threads."""
    return Resource.create({"service.name": f"stepwell-{service}", "service.namespace": "stepwell"})


@contextmanager
def service_tracing(service: str, settings: ServiceSettings) -> Iterator[Tracing]:
    """Yields a Tracing object for the settings. Sends remaining spans after the `with` block."""
    tracing = configure_tracing(service, settings.otlp_endpoint, settings.trace_sample_ratio)
    try:
        yield tracing
    finally:
        tracing.shutdown()


@contextmanager
def ended(span: Span) -> Iterator[None]:
    """Ends a span at the end of the `with` block. Records an exception of the block in the span."""
    try:
        yield
    except Exception as error:
        span.record_exception(error)
        raise
    finally:
        span.end()


def _otlp_exporter(endpoint: str) -> SpanExporter:
    # Imported here, so that processes without tracing do not load the exporter.
    from services.common.telemetry.span_exporter import OtlpExporter  # noqa: PLC0415

    # This logger would log every failed call. SpanSender logs an outage once.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    return OtlpExporter(endpoint)
