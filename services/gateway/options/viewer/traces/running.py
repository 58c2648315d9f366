"""Makes traces of unfinished requests from the gateway's RequestRecords, and from the spans that
schedulers have made of the requests' sequences.
"""

import asyncio
import enum
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry import names
from services.common.telemetry.span_collector import SpanCollector
from services.common.telemetry.span_encoding import encoded_spans
from services.common.telemetry.time_parts import TimePart, parts_of_attributes
from services.common.telemetry.trace_context import numbered_span_id, traceparent_text
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.adapters.telemetry.request_spans import RequestSpans
from services.gateway.adapters.telemetry.request_times import traces_of
from services.gateway.core.traces.time_parts import EngineParts
from services.gateway.core.traces.timeline import Part
from services.gateway.options.viewer.core.trace_store import (
    MaySee,
    SpanRole,
    StoredTrace,
    is_called,
)
from services.gateway.options.viewer.traces.keeping import stored_spans
from services.gateway.options.viewer.traces.trace_document import attributes_of

MAX_SEQUENCES = 64
"""Limit on the number of a request's sequences that are queried at one scheduler."""
_TIMEOUT_SECONDS = 1.0


class Order(enum.Enum):
    """The order in which requests are listed."""

    NEWEST = "newest"
    OLDEST = "oldest"


class RunningTraces:
    """Makes traces of unfinished calls that run the model."""

    def __init__(
        self, records: Mapping[int, RequestRecord], links: SchedulerLinks, model_name: str
    ) -> None:
        """`records` are the records of unfinished calls, the oldest first."""
        self._records = records
        self._links = links
        self._model_name = model_name
        self._spans = SpanCollector("gateway")

    def requests(self, may_see: MaySee, limit: int, order: Order) -> list[StoredTrace]:
        """Returns at most `limit` traces, one for each request, with only the root span. Requests
        are omitted if `may_see` is false for the id of their caller. When a listed request ends,
        its trace is stored, so that it can be read later.
        """
        records = self._generating(may_see)
        if order is Order.NEWEST:
            records.reverse()
        listed = records[:limit]
        for record in listed:
            record.is_watched = True
        now = time.perf_counter_ns()
        return [self._made(record, is_whole=False, now=now) for record in listed]

    async def find(self, name: str, may_see: MaySee) -> StoredTrace | None:
        """Returns the trace with the id `name`, or the newest trace of a request that `name`
        identifies (see `is_called`). Requests are skipped if `may_see` is false for the id of their
        caller. Returns None if there is no such request. When the request ends, its trace is
        stored.
        """
        for record in reversed(self._generating(may_see)):
            if record.trace_id == name.lower() or is_called(record.answer_id, name):
                record.is_watched = True
                return await self._whole(record)
        return None

    def request_ids(self, may_see: MaySee) -> set[str]:
        return {record.answer_id for record in self._generating(may_see)}

    def _generating(self, may_see: MaySee) -> list[RequestRecord]:
        return [
            record
            for record in self._records.values()
            if record.operation and may_see(record.caller.caller_id)
        ]

    def _made(
        self,
        record: RequestRecord,
        *,
        is_whole: bool,
        so_far: EngineParts | None = None,
        now: int | None = None,
    ) -> StoredTrace:
        spans = RequestSpans(record, self._spans.tracing, self._model_name, so_far, now)
        (spans.make if is_whole else spans.make_root)(None)
        trace = StoredTrace(record.trace_id, is_running=True)
        _add(trace, encoded_spans(self._spans.take()), is_own=True)
        return trace

    async def _whole(self, record: RequestRecord) -> StoredTrace:
        asked = _asked(record)
        answers = await asyncio.gather(*(self._ask(*one) for one in asked.items()))
        trace = self._made(record, is_whole=True, so_far=_parts_so_far(answers))
        for answer in answers:
            _add(trace, answer, is_own=False)
        return trace

    async def _ask(
        self, address: str, request: scheduler_pb2.GetRunningSpansRequest
    ) -> ExportTraceServiceRequest:
        try:
            answer = await self._links[address].running_spans(request, _TIMEOUT_SECONDS)
            return ExportTraceServiceRequest.FromString(answer.otlp)
        except (KeyError, grpc.aio.AioRpcError, DecodeError):
            return ExportTraceServiceRequest()


def _asked(record: RequestRecord) -> dict[str, scheduler_pb2.GetRunningSpansRequest]:
    """Maps each scheduler's address to the query for the request's sequences there, with the parent
    span of each sequence.
    """
    asked: dict[str, scheduler_pb2.GetRunningSpansRequest] = defaultdict(
        scheduler_pb2.GetRunningSpansRequest
    )
    for trace in traces_of(record.generation):
        if trace.timeline.ended is not None or trace.timeline.part is not Part.ENGINE:
            continue
        address = next((one for one, at in trace.stays.items() if at == trace.span_number), None)
        if address is None or len(asked[address].requests) == MAX_SEQUENCES:
            continue
        span_id = numbered_span_id(record.generate_span_id, trace.span_number)
        asked[address].requests.add(
            request_id=trace.request_id,
            traceparent=traceparent_text(record.origin.trace_id, span_id),
        )
    return asked


def _parts_so_far(answers: Iterable[ExportTraceServiceRequest]) -> EngineParts:
    """Returns the parts of each sequence's time so far, which the schedulers' spans contain."""
    parts: dict[str, tuple[TimePart, ...]] = {}
    for answer in answers:
        for group in answer.resource_spans:
            for span in (span for scope in group.scope_spans for span in scope.spans):
                if span.name == names.SPAN_REQUEST:
                    attributes = attributes_of(span.attributes)
                    parts[attributes[names.ATTR_REQUEST_ID]] = parts_of_attributes(attributes)
    return parts


def _add(trace: StoredTrace, message: ExportTraceServiceRequest, *, is_own: bool) -> None:
    for _, span in stored_spans(message.resource_spans, is_own=is_own):
        trace.spans.append(span)
        if span.role is SpanRole.REQUEST:
            trace.roots.append(span)
