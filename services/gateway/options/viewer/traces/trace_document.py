"""Formats stored traces as JSON."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from services.common.telemetry import names
from services.common.telemetry.time_parts import EXPLANATIONS, parts_of_attributes, time_line
from services.gateway.options.viewer.core.trace_store import StoredSpan, StoredTrace

_WITH_CLIENTS_TEXT = {names.GENAI_REQUEST_STOP_SEQUENCES}
"""Names of attributes that are omitted, because they contain clients' text."""

Document = dict[str, Any]


def summary(trace: StoredTrace) -> Document:
    """Returns a summary of one request, which has ended or is running."""
    assert trace.root is not None
    root = trace_pb2.Span.FromString(trace.root.encoded)
    return {
        "trace_id": trace.trace_id,
        "request_id": trace.request_id,
        "name": root.name,
        "started_unix_seconds": root.start_time_unix_nano / 1e9,
        "seconds": _seconds(root.start_time_unix_nano, root.end_time_unix_nano),
        "error": _error(root),
        "is_running": trace.is_running,
        "num_spans": len(trace.spans),
        "attributes": attributes_of(root.attributes),
    }


def turn_of(trace: StoredTrace, program: str) -> Document | None:
    """Describes the request as a turn of an agent program: its number, and what ran before it.
    Returns None if it does not belong to the program.
    """
    for one in trace.spans:
        if names.ATTR_PROGRAM.encode() not in one.encoded:
            continue
        attributes = attributes_of(trace_pb2.Span.FromString(one.encoded).attributes)
        if attributes.get(names.ATTR_PROGRAM) == program:
            return {
                "number": attributes[names.ATTR_TURN],
                "tool": attributes.get(names.ATTR_TOOL, ""),
                "pause_seconds": attributes.get(names.ATTR_PAUSE_SECONDS),
                "context_tokens": attributes.get(names.ATTR_CONTEXT_TOKENS, 0),
                "recomputed_tokens": attributes.get(names.ATTR_RECOMPUTED_TOKENS, 0),
            }
    return None


def document(trace: StoredTrace) -> Document:
    """Returns a trace with all its spans, in the order of `in_tree`. Times are in seconds from the
    start of the first span.
    """
    spans = [(one.service, trace_pb2.Span.FromString(one.encoded)) for one in trace.spans]
    start = min((span.start_time_unix_nano for _, span in spans), default=0)
    return {
        "trace_id": trace.trace_id,
        "request_id": trace.request_id,
        "is_complete": trace.root is not None and not trace.is_running,
        "is_running": trace.is_running,
        "started_unix_seconds": start / 1e9,
        "time": _time(trace.root),
        "spans": [_span(service, span, depth, start) for service, span, depth in in_tree(spans)],
    }


def in_tree(
    spans: Iterable[tuple[str, trace_pb2.Span]],
) -> Iterator[tuple[str, trace_pb2.Span, int]]:
    """Yields each span with its service and its depth in the tree of spans. A span precedes its
    children, which are in order of their start. A span whose parent is missing has depth 0.
    """
    by_start = sorted(spans, key=lambda one: one[1].start_time_unix_nano)
    known = {span.span_id for _, span in by_start}
    children: dict[bytes, list[tuple[str, trace_pb2.Span]]] = {}
    for service, span in by_start:
        parent = span.parent_span_id if span.parent_span_id in known else b""
        children.setdefault(parent, []).append((service, span))
    stack = [(*one, 0) for one in reversed(children.pop(b"", []))]
    while stack:
        service, span, depth = stack.pop()
        yield service, span, depth
        below = children.pop(span.span_id, [])
        stack += [(*one, depth + 1) for one in reversed(below)]


def _span(service: str, span: trace_pb2.Span, depth: int, start: int) -> Document:
    return {
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "depth": depth,
        "name": span.name,
        "service": service,
        "start": _seconds(start, span.start_time_unix_nano),
        "seconds": _seconds(span.start_time_unix_nano, span.end_time_unix_nano),
        "error": _error(span),
        "attributes": attributes_of(span.attributes),
        "events": [
            {
                "name": event.name,
                "at": _seconds(start, event.time_unix_nano),
                "attributes": attributes_of(event.attributes),
            }
            for event in span.events
        ],
        "num_links": len(span.links),
    }


def _seconds(start: int, end: int) -> float:
    return (end - start) / 1e9


def _error(span: trace_pb2.Span) -> str | None:
    if span.status.code != trace_pb2.Status.STATUS_CODE_ERROR:
        return None
    return span.status.message or "failed"


def _time(root: StoredSpan | None) -> Document | None:
    """Describes the request's time by a line of text, and by its parts, each with an explanation.
    Returns None if the request's root span is not stored yet.
    """
    if root is None:
        return None
    span = trace_pb2.Span.FromString(root.encoded)
    parts = parts_of_attributes(attributes_of(span.attributes))
    return {
        "line": time_line(parts),
        "seconds": _seconds(span.start_time_unix_nano, span.end_time_unix_nano),
        "parts": [
            {
                "name": part.name,
                "seconds": part.seconds,
                "explanation": EXPLANATIONS[part.name],
                "waited_for": part.request_id or None,
                "step": part.step,
            }
            for part in parts
        ],
    }


def attributes_of(pairs: Iterable[common_pb2.KeyValue]) -> Mapping[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if pair.key not in _WITH_CLIENTS_TEXT}


def _value(value: common_pb2.AnyValue) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(one) for one in value.array_value.values]
        case "kvlist_value":
            return attributes_of(value.kvlist_value.values)
        case "bytes_value":
            return value.bytes_value.hex()
        case kind:
            return getattr(value, kind)
