"""Stands in for the OpenTelemetry collector, Jaeger and Grafana. Accepts spans over OTLP/gRPC, and
serves their number as a metric on all HTTP ports that the tests request.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

OTLP_PORT = 4317
PAGE_PORTS = (13133, 8889, 16686, 3000)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the received spans."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(  # noqa: N802
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.num_spans += sum(
            len(scope.spans) for group in request.resource_spans for scope in group.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    receiver = Receiver()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (
                "# TYPE standin_received_spans_total counter\n"
                f"standin_received_spans_total {receiver.num_spans}\n"
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    server.add_insecure_port(f"0.0.0.0:{OTLP_PORT}")
    server.start()
    for port in PAGE_PORTS:
        page = ThreadingHTTPServer(("0.0.0.0", port), Page)
        threading.Thread(target=page.serve_forever).start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
