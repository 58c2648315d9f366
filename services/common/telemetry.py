"""Tracing: over OTLP if an endpoint is set, else none.

Sampling is parent-based: the service where a trace begins decides by ratio, and the services below
follow the flag in the W3C `traceparent` that travels in messages. An unsampled trace context is
sent as the empty string, so that a service below spends one comparison on it.
"""

import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, TraceFlags

from services.common.service_settings import ServiceSettings

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

# Versions after 00 may append more.
_TRACEPARENT = re.compile(
    "(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})"
    "-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_SAMPLED = 1

LAST_EXPORT_SECONDS = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tracing:
    """A service's tracer. Without a provider every span is INVALID_SPAN."""

    tracer: trace.Tracer
    provider: TracerProvider | None

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self.provider is not None

    def start(
        self,
        name: str,
        traceparent: str = "",
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        start_unix_nanos: int | None = None,
    ) -> Span:
        """Starts a span under `traceparent`, or a new trace if that names no span. The caller ends
        it.
        """
        if self.provider is None:
            return INVALID_SPAN
        parent = parse_traceparent(traceparent)
        context = otel_context.Context()
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent), context)
        return self.tracer.start_span(
            name,
            context=context,
            kind=kind,
            attributes=attributes,
            start_time=start_unix_nanos,
        )

    def child(
        self,
        name: str,
        traceparent: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        start_unix_nanos: int | None = None,
    ) -> Span:
        """Starts a span under `traceparent`; INVALID_SPAN if that names no span."""
        if not traceparent or parse_traceparent(traceparent) is None:
            return INVALID_SPAN
        return self.start(
            name, traceparent, kind=kind, attributes=attributes, start_unix_nanos=start_unix_nanos
        )

    def shutdown(self) -> None:
        """Sends what is left, within LAST_EXPORT_SECONDS. Spans not taken by then are lost."""
        if self.provider is None:
            return
        # The SDK's own bounds are an export's ten seconds and a shutdown's thirty.
        sending = threading.Thread(target=self.provider.shutdown, name="last export", daemon=True)
        sending.start()
        sending.join(LAST_EXPORT_SECONDS)
        if sending.is_alive():
            logger.warning(
                "the collector did not take the last spans within %g s", LAST_EXPORT_SECONDS
            )


def configure_tracing(
    service: str,
    endpoint: str,
    sample_ratio: float,
    *,
    exporter: SpanExporter | None = None,
) -> Tracing:
    """Tracing of a service. `endpoint` is an OTLP/gRPC URL such as http://host:4317, or empty.

    An `exporter` takes the place of the endpoint and gets every span as it ends.
    """
    if not endpoint and exporter is None:
        return Tracing(trace.NoOpTracer(), None)
    resource = Resource.create(
        {"service.name": f"stepwell-{service}", "service.namespace": "stepwell"}
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(sample_ratio))
    )
    provider.add_span_processor(
        SimpleSpanProcessor(exporter) if exporter else BatchSpanProcessor(_otlp_exporter(endpoint))
    )
    return Tracing(provider.get_tracer("stepwell"), provider)


@contextmanager
def service_tracing(service: str, settings: ServiceSettings) -> Iterator[Tracing]:
    """Tracing as the settings ask for it. At the end, what is left is sent."""
    tracing = configure_tracing(service, settings.otlp_endpoint, settings.trace_sample_ratio)
    try:
        yield tracing
    finally:
        tracing.shutdown()


@contextmanager
def ended(span: Span) -> Iterator[None]:
    """Ends a span with the block, noting what was raised."""
    try:
        yield
    except Exception as error:
        span.record_exception(error)
        raise
    finally:
        span.end()


def traceparent_of(span: Span) -> str:
    """The span's W3C trace context, or the empty string when it is not sampled."""
    context = span.get_span_context()
    if not context.is_valid or not context.trace_flags & TraceFlags.SAMPLED:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def parse_traceparent(traceparent: str) -> SpanContext | None:
    """The remote span that a `traceparent` names; None when it is empty or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return None
    context = SpanContext(
        int(match["trace_id"], 16),
        int(match["span_id"], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match["flags"], 16) & _SAMPLED),
    )
    return context if context.is_valid else None


def _otlp_exporter(endpoint: str) -> SpanExporter:
    # Imported here: without tracing no process pays for loading the exporter.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )

    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
