"""Collects spans in memory for display, instead of sending them to a collector."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.common.telemetry.tracing import configure_tracing


class SpanCollector(SpanExporter):
    """Creates a Tracing object, and stores its ended spans until `take` is called."""

    def __init__(self, service: str) -> None:
        self.tracing = configure_tracing(service, "", 1.0, exporter=self)
        self._spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._spans += spans
        return SpanExportResult.SUCCESS

    def take(self) -> list[ReadableSpan]:
        """Returns the spans that ended since the last call, in the order in which they ended."""
        taken, self._spans = self._spans, []
        return taken
