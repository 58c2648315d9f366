"""Stores the gateway's own spans, and spans that it receives from other services over OTLP."""

from collections.abc import Iterable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from services.common.rpc.server import Context
from services.common.telemetry import names
from services.gateway.adapters.telemetry.request_record import KeptFor
from services.gateway.options.viewer.core.trace_store import SpanRole, StoredSpan, TraceStore

_SERVICE_NAME = "service.name"
_WANTED = {KeptFor.FAILED.value, KeptFor.SLOW.value, KeptFor.SLOWEST.value}


class TraceServicer(trace_service_pb2_grpc.TraceServiceServicer):
    """Implements OTLP's trace service. Adds the received spans to the trace store."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(  # noqa: N802 - the contract's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        keep(self._store, request.resource_spans, is_own=False)
        return trace_service_pb2.ExportTraceServiceResponse()


class StoreExporter(SpanExporter):
    """Adds the gateway's own spans to the trace store. Encodes all spans of a request together when
    the request's own span, the last one, is recorded. This costs half as much as encoding each span
    by itself.
    """

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._spans += spans
        if spans[-1].kind is SpanKind.SERVER:
            keep(self._store, encode_spans(self._spans).resource_spans, is_own=True)
            self._spans = []
        return SpanExportResult.SUCCESS


def keep(
    store: TraceStore, resource_spans: Iterable[trace_pb2.ResourceSpans], *, is_own: bool
) -> None:
    """Adds spans to the store. `is_own` is true if this gateway made the spans."""
    for trace_id, span in stored_spans(resource_spans, is_own=is_own):
        store.add(trace_id, span)


def stored_spans(
    resource_spans: Iterable[trace_pb2.ResourceSpans], *, is_own: bool
) -> Iterator[tuple[str, StoredSpan]]:
    """Yields each span with the id of its trace. `is_own` is true if this gateway made it."""
    for group in resource_spans:
        service = text_of(group.resource.attributes, _SERVICE_NAME)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield span.trace_id.hex(), _stored(service, span, is_own=is_own)


def _stored(service: str, span: trace_pb2.Span, *, is_own: bool) -> StoredSpan:
    """Converts a span, and determines its role. A server span of this gateway is a request. A span
    of another service without a parent is an engine step.
    """
    encoded = span.SerializeToString()
    if is_own and span.kind == trace_pb2.Span.SPAN_KIND_SERVER:
        request_id = text_of(span.attributes, names.GENAI_RESPONSE_ID) or text_of(
            span.attributes, names.ATTR_REQUEST_ID
        )
        caller_id = text_of(span.attributes, names.ATTR_TENANT)
        is_wanted = text_of(span.attributes, names.ATTR_KEPT_FOR) in _WANTED
        return StoredSpan(
            service, encoded, SpanRole.REQUEST, request_id, caller_id, is_wanted=is_wanted
        )
    is_root = not is_own and not span.parent_span_id
    return StoredSpan(service, encoded, SpanRole.STEP if is_root else SpanRole.PART)


def text_of(attributes: Iterable[common_pb2.KeyValue], key: str) -> str:
    """Returns the string value of an attribute, or "" if the attribute is missing."""
    return next((pair.value.string_value for pair in attributes if pair.key == key), "")
