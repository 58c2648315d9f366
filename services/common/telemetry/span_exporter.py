"""Exports spans over OTLP. Only processes that send spans import this module, because the import of
OpenTelemetry's exporter takes a tenth of a scheduler's startup time.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from services.common.rpc.status import from_peer
from services.common.telemetry.span_encoding import encoded_spans
from services.common.telemetry.span_sender import NotTaken


class OtlpExporter(OTLPSpanExporter):
    """OpenTelemetry's exporter with a faster encoder. A failed export raises NotTaken."""

    def __init__(self, endpoint: str) -> None:
        self._collector = f"the collector at {endpoint}"
        self._error: grpc.RpcError | None = None
        super().__init__(endpoint=endpoint, insecure=not endpoint.startswith("https://"))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if super().export(spans) is SpanExportResult.SUCCESS:
            return SpanExportResult.SUCCESS
        error = self._error
        if not isinstance(error, grpc.Call):
            raise NotTaken(f"the spans were not sent to {self._collector}", may_retry=True)
        may_retry = error.code() in self._retryable_error_codes
        raise NotTaken(from_peer(self._collector, error).message, may_retry=may_retry) from error

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        stub: Any = self._client
        call = stub.Export

        def export(**arguments: Any) -> Any:
            try:
                return call(**arguments)
            except grpc.RpcError as error:
                self._error = error
                raise

        stub.Export = export

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encoded_spans(data)
