"""Spans over OTLP. Loading the SDK's exporter takes a tenth of a scheduler's start, so that only
what sends spans imports this.
"""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from services.common.span_encoding import encoded_spans


class OtlpExporter(OTLPSpanExporter):
    """The SDK's exporter with another encoder."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encoded_spans(data)
