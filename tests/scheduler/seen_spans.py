"""Converts the spans of an OTLP receiver and of an in-memory exporter to the same form."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.sdk.trace import ReadableSpan

from tests.otlp_receiver import OtlpReceiver


@dataclass(frozen=True, slots=True)
class Seen:
    """A recorded span."""

    name: str
    kind: str
    trace_id: int
    span_id: int
    parent: int | None
    start_unix_nanos: int
    end_unix_nanos: int
    links: tuple[int, ...] = ()
    """The ids of linked spans."""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()


def received(receiver: OtlpReceiver) -> list[Seen]:
    return [_from_wire(one.span) for one in tuple(receiver.spans)]


def seen(spans: Iterable[ReadableSpan]) -> list[Seen]:
    return [
        Seen(
            span.name,
            span.kind.name,
            span.context.trace_id,
            span.context.span_id,
            span.parent.span_id if span.parent is not None else None,
            span.start_time or 0,
            span.end_time or 0,
            tuple(link.context.span_id for link in span.links),
            dict(span.attributes or {}),
            tuple(event.name for event in span.events),
        )
        for span in spans
    ]


def _from_wire(span: Any) -> Seen:
    return Seen(
        span.name,
        type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        int.from_bytes(span.trace_id, "big"),
        int.from_bytes(span.span_id, "big"),
        int.from_bytes(span.parent_span_id, "big") if span.parent_span_id else None,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        tuple(int.from_bytes(link.span_id, "big") for link in span.links),
        _attributes(span.attributes),
        tuple(event.name for event in span.events),
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in pairs
    }
