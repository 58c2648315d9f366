"""An OTLP receiver that stores spans while a measurement asks for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span as it was exported. Times are in nanoseconds since the epoch."""

    name: str
    trace_id: bytes
    start: int
    end: int
    attributes: dict[str, str | int | float | bool]
    links: tuple[bytes, ...]
    """Trace ids of the linked spans."""
    events: dict[str, int]
    span_id: bytes = b""
    parent_id: bytes = b""
    """Span id of the parent. It is empty for the root span of a trace."""

    @property
    def nanos(self) -> int:
        return self.end - self.start


class SpanReceiver:
    """Serves OTLP over gRPC on a free port of this machine inside `async with`."""

    def __init__(self) -> None:
        self._keeping = False
        self._exports: list[bytes] = []
        self._answer = ExportTraceServiceResponse().SerializeToString()
        self._server = grpc.aio.server(options=(("grpc.max_receive_message_length", _MAX_BYTES),))
        self.endpoint = ""

    async def __aenter__(self) -> "SpanReceiver":
        # Received export requests are parsed only in `take`, so that receiving them costs little.
        methods: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(self._export)}
        handler = grpc.method_handlers_generic_handler(_SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler,))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def keep(self) -> None:
        self._keeping = True

    def take(self) -> list[SpanRecord]:
        """Returns the stored spans and stops storing. To be called after the services have stopped,
        because they send their last spans when they stop.
        """
        exports, self._exports, self._keeping = self._exports, [], False
        return [record for export in exports for record in _records(export)]

    async def _export(self, request: bytes, _context: object) -> bytes:
        if self._keeping:
            self._exports.append(request)
        return self._answer


def _records(export: bytes) -> Iterator[SpanRecord]:
    for resource in ExportTraceServiceRequest.FromString(export).resource_spans:
        for scope in resource.scope_spans:
            yield from map(_record, scope.spans)


def _record(span: trace_pb2.Span) -> SpanRecord:
    return SpanRecord(
        name=span.name,
        trace_id=span.trace_id,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={item.key: _value(item.value) for item in span.attributes},
        links=tuple(link.trace_id for link in span.links),
        events={event.name: event.time_unix_nano for event in span.events},
        span_id=span.span_id,
        parent_id=span.parent_span_id,
    )


def _value(value: AnyValue) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    found: str | int | float | bool = getattr(value, kind) if kind else ""
    return found
