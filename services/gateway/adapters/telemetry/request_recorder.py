"""Begins and ends the RequestRecords of calls, and makes the calls' spans and access log lines."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common.telemetry.trace_context import numbered_span_id, traceparent_text
from services.common.telemetry.trace_headers import TraceHeaders, passed_on
from services.common.telemetry.tracing import Tracing
from services.gateway.adapters.telemetry.access_log import log_access
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.request_record import (
    REQUEST_ID,
    Call,
    KeptFor,
    RequestRecord,
    new_record,
)
from services.gateway.adapters.telemetry.request_spans import RequestSpans
from services.gateway.adapters.telemetry.request_times import traces_of
from services.gateway.core.request.request_check import is_request_id
from services.gateway.core.traces.slowest_requests import SlowestRequests
from services.gateway.core.traces.trace_limit import TraceLimit

MAX_PER_MINUTE = 30
"""Limit on the requests that are traced for each reason in LIMITED, although not sampled. Without
it, all requests would be traced when a queue grows, because each is slower than the one before.
"""
LIMITED = KeptFor.FAILED, KeptFor.SLOW, KeptFor.SLOWEST

KeepTrace = Callable[[str, str, TraceHeaders], None]
"""Asks a scheduler to export the spans of a sequence. The arguments are the scheduler's address,
the sequence's id, and the headers with the parent span.
"""


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    model_name: str
    slow_seconds: float
    """Requests that take at least this number of seconds are traced even if they were not sampled.
    0 disables this rule.
    """
    num_slowest: int
    """Number of slowest requests per minute that are traced even if they were not sampled."""
    access_log: bool


class RequestRecorder:
    """Decides at the end of each request whether it is traced.

    A request is traced if it was sampled at its start, failed, was slow, was among the slowest of
    its minute, or if its trace was read or listed while it ran. At most MAX_PER_MINUTE requests are
    traced for each of some reasons. While a request runs, only numbers are recorded.
    """

    def __init__(
        self,
        settings: RecorderSettings,
        tracing: Tracing,
        metrics: Metrics,
        keep: KeepTrace,
        running: dict[int, RequestRecord],
    ) -> None:
        """`running` maps the ids of root spans to the records of calls that have not ended. The
        oldest call is first.
        """
        self._settings = settings
        self._tracing = tracing
        self._metrics = metrics
        self._keep = keep
        self._slowest = SlowestRequests(settings.num_slowest)
        self._limits = {reason: TraceLimit(MAX_PER_MINUTE) for reason in LIMITED}
        self._running = running

    def begin(
        self, call: Call, operation: str, headers: Mapping[str, str], arrived: int | None = None
    ) -> RequestRecord:
        """Starts the record of a call. The keys of `headers` are lower-case names.

        The request id is the client's if it is valid, and otherwise a new id. A call without an
        operation, such as a scrape of metrics, has no spans and is not sampled, so that it does not
        count towards the limit on sampled requests.
        """
        given = headers.get(REQUEST_ID.lower(), "")
        origin = self._tracing.origin(
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
            may_be_drawn=bool(operation),
        )
        request_id = given if is_request_id(given) else secrets.token_hex(12)
        baggage = passed_on(headers.get("baggage", ""))
        if arrived is None:
            arrived = time.perf_counter_ns()
        record = new_record(call, headers, request_id, origin, baggage, arrived)
        record.operation = operation
        self._running[record.root_span_id] = record
        return record

    def end_soon(self, record: RequestRecord) -> None:
        """Ends a record in the next iteration of the event loop. A gRPC handler uses this method in
        place of `end`, because the call's status is sent only after the handler has returned, and
        should not wait until the spans and the log line are made.
        """
        record.timeline.end()
        asyncio.get_running_loop().call_soon(self.end, record)

    def end(self, record: RequestRecord) -> None:
        """Ends the record of a call. Makes spans if the call is traced, and logs the call."""
        self._running.pop(record.root_span_id, None)
        record.timeline.end()
        if record.operation and self._tracing.enabled and (reason := self._kept_for(record)):
            self._metrics.trace_kept(reason)
            self._trace(record, reason)
        if self._settings.access_log:
            log_access(record)

    def _kept_for(self, record: RequestRecord) -> KeptFor | None:
        reason = self._reason(record)
        if reason not in self._limits or record.origin.is_sampled or record.is_watched:
            return reason
        return reason if self._limits[reason].take((record.timeline.ended or 0) / 1e9) else None

    def _reason(self, record: RequestRecord) -> KeptFor | None:
        ended = (record.timeline.ended or 0) / 1e9
        is_slowest = self._slowest.is_among(record.seconds, ended)
        if record.origin.is_sampled and not (is_slowest or record.is_failure):
            return KeptFor.SAMPLED
        if record.is_failure:
            return KeptFor.FAILED
        slow = self._settings.slow_seconds
        if slow and record.seconds >= slow:
            return KeptFor.SLOW
        if is_slowest:
            return KeptFor.SLOWEST
        return KeptFor.WATCHED if record.is_watched else None

    def _trace(self, record: RequestRecord, reason: KeptFor) -> None:
        spans = RequestSpans(record, self._tracing, self._settings.model_name)
        spans.make(reason)
        if spans.num_dropped:
            self._metrics.trace_cut(spans.num_dropped)
        if record.origin.is_sampled:
            return
        for trace in traces_of(record.generation):
            for address, number in trace.stays.items():
                span_id = numbered_span_id(record.generate_span_id, number)
                traceparent = traceparent_text(record.origin.trace_id, span_id)
                headers = TraceHeaders(traceparent, record.origin.tracestate)
                self._keep(address, trace.request_id, headers)
