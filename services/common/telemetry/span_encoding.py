"""Encodes spans as OTLP messages in a third of the processor time of the OpenTelemetry SDK's own
encoder. Links and most attributes repeat, because each step of a request has a link to the request,
and each request of a step has a link to the step. Encoded links and attributes are cached.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode

_HAS_REMOTE = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_IS_REMOTE = trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_KINDS = {kind: trace_pb2.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}
_CODES = {
    code: trace_pb2.Status.StatusCode.Value(f"STATUS_CODE_{code.name}") for code in StatusCode
}
_MANY = 4096
_SMALL = 4096

Attributes = Mapping[str, Any]
"""Attributes as in OpenTelemetry. Values are strings, booleans, numbers, and sequences of them."""


def encoded_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Returns the same message as the SDK's `encode_spans`. An attribute value that OTLP cannot
    express, such as None or an integer of more than 64 bits, is encoded as text, because an error
    would lose all of `spans`.
    """
    groups: dict[tuple[int, int], list[ReadableSpan]] = defaultdict(list)
    for span in spans:
        groups[id(span.resource), id(span.instrumentation_scope)].append(span)
    request = ExportTraceServiceRequest()
    for group in groups.values():
        # The SDK encodes the resource and the scope of a group, from an otherwise empty span.
        first = group[0]
        shared = ReadableSpan(
            "",
            first.context,
            resource=first.resource,
            instrumentation_scope=first.instrumentation_scope,
            start_time=0,
            end_time=0,
        )
        (resource,) = encode_spans([shared]).resource_spans
        (scope,) = resource.scope_spans
        del scope.spans[:]
        scope.spans.extend(map(_span, group))
        request.resource_spans.append(resource)
    return request


def _span(span: ReadableSpan) -> trace_pb2.Span:
    context, parent = span.context, span.parent
    if context is None:
        raise AssertionError(f"the span {span.name} has no context")
    message = trace_pb2.Span(
        trace_id=context.trace_id.to_bytes(16),
        span_id=context.span_id.to_bytes(8),
        trace_state=_trace_state(context),
        parent_span_id=parent.span_id.to_bytes(8) if parent is not None else b"",
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.start_time or 0,
        end_time_unix_nano=span.end_time or 0,
        attributes=_attributes(span.attributes),
        events=[_event(event) for event in span.events],
        status=trace_pb2.Status(
            code=_CODES[span.status.status_code], message=span.status.description or ""
        ),
        dropped_attributes_count=span.dropped_attributes,
        dropped_events_count=span.dropped_events,
        dropped_links_count=span.dropped_links,
        flags=_flags(parent),
    )
    if links := span.links:
        message.MergeFromString(b"".join(map(_link, links)))
    return message


def _trace_state(context: SpanContext) -> str:
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items())


def _flags(context: SpanContext | None) -> int:
    return _HAS_REMOTE | _IS_REMOTE if context is not None and context.is_remote else _HAS_REMOTE


def _event(event: Event) -> trace_pb2.Span.Event:
    return trace_pb2.Span.Event(
        name=event.name,
        time_unix_nano=event.timestamp,
        attributes=_attributes(event.attributes),
        dropped_attributes_count=event.dropped_attributes,
    )


@lru_cache(_MANY)
def _link(link: Link) -> bytes:
    """Encodes a message Span that has only this link. Only the same Link object hits the cache."""
    context = link.context
    message = trace_pb2.Span.Link(
        trace_id=context.trace_id.to_bytes(16),
        span_id=context.span_id.to_bytes(8),
        attributes=_attributes(link.attributes),
        dropped_attributes_count=link.dropped_attributes,
        flags=_flags(context),
    )
    return trace_pb2.Span(links=[message]).SerializeToString()


def _attributes(attributes: Attributes | None) -> list[KeyValue]:
    return [_attribute(key, value) for key, value in (attributes or {}).items()]


def _attribute(key: str, value: Any) -> KeyValue:
    is_small = type(value) is int and 0 <= value < _SMALL
    if is_small or isinstance(value, bool):
        return _frequent(key, value)
    try:
        return KeyValue(key=key, value=_value(value))
    except (TypeError, ValueError):
        return KeyValue(key=key, value=AnyValue(string_value=ascii(value)))


@lru_cache(_MANY, typed=True)
def _frequent(key: str, value: int) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


def _value(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, Iterable):
        return AnyValue(array_value=ArrayValue(values=map(_value, value)))
    raise TypeError(f"an attribute is a {type(value).__name__}")
