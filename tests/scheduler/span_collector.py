"""An OTLP collector that stores received spans, and a function that converts the spans of an
in-memory exporter to the same form.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.sdk.trace import ReadableSpan


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


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans in its own thread, because exporters may block the test's thread."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.services: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def Export(  # noqa: N802
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = _attributes(resource.resource.attributes)
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += [_from_wire(span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


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
