"""The W3C trace context that a client sends."""

from opentelemetry.trace import Span, TraceFlags

from services.common.telemetry.trace_context import traceparent_text


def traceparent_of(span: Span) -> str:
    """The span's W3C trace context. It is empty if the span is not sampled."""
    context = span.get_span_context()
    if not context.is_valid or not context.trace_flags & TraceFlags.SAMPLED:
        return ""
    return traceparent_text(context.trace_id, context.span_id)
