"""Formats stored traces as JSON.

`own_ids` are the ids of the requests that the reader may see, or None if it may see all requests.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from services.common.telemetry import names
from services.common.telemetry.time_parts import EXPLANATIONS, parts_of_attributes, time_line
from services.gateway.options.viewer.core.trace_store import SpanRole, StoredSpan, StoredTrace

_WITH_CLIENTS_TEXT = {names.GENAI_REQUEST_STOP_SEQUENCES}
"""Names of attributes that are omitted, because they contain clients' text."""

_OF_OTHERS = (names.ATTR_WAITED_FOR, names.ATTR_RETAINED)
"""Attributes that name a request or program for which the trace's request waited."""

Document = dict[str, Any]
OwnIds = Collection[str] | None


def summary(trace: StoredTrace, own_ids: OwnIds = None) -> Document:
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
        "attributes": _attributes(root.attributes, own_ids),
    }


def own_part(trace: StoredTrace) -> StoredTrace:
    """Returns the trace with only the spans of the requests in its `roots`: their own spans and the
    spans below, but not below another request.
    """
    parents = dict[bytes, tuple[StoredSpan, bytes]]()
    for one in trace.spans:
        span = trace_pb2.Span.FromString(one.encoded)
        parents[span.span_id] = one, span.parent_span_id
    roots = set(trace.roots)

    def is_own(span_id: bytes) -> bool:
        for _ in range(len(parents)):
            if span_id not in parents:
                return False
            one, parent_id = parents[span_id]
            if one.role is SpanRole.REQUEST:
                return one in roots
            span_id = parent_id
        return False

    return replace(trace, spans=[one for span_id, (one, _) in parents.items() if is_own(span_id)])


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


def document(trace: StoredTrace, own_ids: OwnIds = None) -> Document:
    """Returns a trace with all spans that the reader may see, in the order of `in_tree`. Times are
    in seconds from the start of the first span.
    """
    trace = trace if own_ids is None else own_part(trace)
    spans = [(one.service, trace_pb2.Span.FromString(one.encoded)) for one in trace.spans]
    start = min((span.start_time_unix_nano for _, span in spans), default=0)
    return {
        "trace_id": trace.trace_id,
        "request_id": trace.request_id,
        "is_complete": trace.root is not None and not trace.is_running,
        "is_running": trace.is_running,
        "started_unix_seconds": start / 1e9,
        "time": _time(trace.root, own_ids),
        "spans": [_span(*one, start, own_ids) for one in in_tree(spans)],
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


def _span(service: str, span: trace_pb2.Span, depth: int, start: int, own_ids: OwnIds) -> Document:
    return {
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "depth": depth,
        "name": span.name,
        "service": service,
        "start": _seconds(start, span.start_time_unix_nano),
        "seconds": _seconds(span.start_time_unix_nano, span.end_time_unix_nano),
        "error": _error(span),
        "attributes": _attributes(span.attributes, own_ids),
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


def _time(root: StoredSpan | None, own_ids: OwnIds) -> Document | None:
    """Describes the request's time by a line of text, and by its parts, each with an explanation.
    Returns None if the request's root span is not stored yet.
    """
    if root is None:
        return None
    span = trace_pb2.Span.FromString(root.encoded)
    parts = parts_of_attributes(_attributes(span.attributes, own_ids))
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


def _attributes(pairs: Iterable[common_pb2.KeyValue], own_ids: OwnIds) -> Mapping[str, Any]:
    """Returns the attributes without the ids of requests that the reader may not see."""
    attributes = attributes_of(pairs)
    if own_ids is None:
        return attributes
    return {
        key: value
        for key, value in attributes.items()
        if not _names_a_request(key) or value in own_ids or value.rpartition("-")[0] in own_ids
    }


def _names_a_request(key: str) -> bool:
    is_of_time = key.startswith(f"{names.ATTR_TIME}.") and key.endswith(".request_id")
    return is_of_time or key in _OF_OTHERS


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
