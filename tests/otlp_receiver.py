"""A real OTLP/gRPC receiver that stores the received spans."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class ReceivedSpan:
    """A span and the service that sent it."""

    service: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans on a free port of this machine."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for group in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in group.resource.attributes}
            service = attributes["service.name"]
            self.spans += [
                ReceivedSpan(service, span) for scope in group.scope_spans for span in scope.spans
            ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in tuple(self.spans) if span.trace_id == trace_id]

    def close(self) -> None:
        self._server.stop(None).wait()
