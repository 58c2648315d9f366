"""The record of one client call while the call is served: its ids, times and outcome."""

import enum
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from services.common import errors
from services.common.process.logs import REQUEST_FIELDS
from services.common.telemetry import names
from services.common.telemetry.trace_context import new_span_id, traceparent_text
from services.common.telemetry.trace_headers import TraceHeaders
from services.common.telemetry.tracing import TraceOrigin
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.generation import Generation
from services.gateway.core.traces.timeline import Part, Timeline

REQUEST_ID, TRACE_ID = "X-Request-Id", "X-Trace-Id"
"""Headers of every HTTP answer. In gRPC, the same names in lower case are trailing metadata."""
CANCELLED = "cancelled"
"""The error type of a request whose client disconnected."""
CLIENT_CLOSED_REQUEST = "499"
"""The status that is recorded for an HTTP request whose client disconnected before the answer
began.
"""
_FAILURES = (errors.InternalError, errors.Aborted, errors.Unavailable)
_QUEUE_TIMEOUT = "QUEUE_TIMEOUT"

CALL_RECORD: ContextVar["RequestRecord"] = ContextVar("call_record")
"""The record of the gRPC call in the current task. For HTTP it is `request.state.record`."""


CALL_ARRIVAL: ContextVar[Arrival] = ContextVar("call_arrival")
"""The Arrival of the gRPC call in the current task, which counts the call as arriving until its
sequences are queued for a replica. For HTTP the Arrival is in the request's state.
"""


class KeptFor(enum.Enum):
    """Why a request's spans are exported."""

    SAMPLED = "sampled"
    FAILED = "failed"
    SLOW = "slow"
    """The request took at least as long as the setting for slow requests."""
    SLOWEST = "slowest"
    """The request was among the slowest requests of its minute."""
    WATCHED = "watched"
    """The request's trace was read or listed while the request ran."""


@dataclass(frozen=True, slots=True)
class Call:
    """A client's call, as the access log shows it."""

    protocol: str
    method: str
    path: str
    client: str
    """The client's address. It is empty over a Unix socket."""


@dataclass(slots=True)
class RequestRecord:
    """The record of a call until its end, for logs, metrics and spans. Times are nanoseconds of
    `time.perf_counter_ns`.
    """

    call: Call
    headers: Mapping[str, str]
    """Maps lower-case names of headers to values. In gRPC the headers are the call's metadata."""
    request_id: str
    origin: TraceOrigin
    """The trace id, the client's span, and whether the trace is sampled."""
    timeline: Timeline
    """The parts of the call's time, from the call's arrival on."""
    baggage: str = ""
    """The client's W3C header `baggage`, which is sent to replicas with the sequences."""
    operation: str = ""
    """The name of the operation in OpenTelemetry's GenAI conventions. It is empty for calls that do
    not run the model, which have no spans.
    """
    caller: Caller = ANYONE
    status: str = ""
    """The HTTP status code, or the name of the gRPC status."""
    error_type: str = ""
    error_message: str = ""
    is_failure: bool = False
    """Whether the call ended with an error of the server (see the function `is_failure`)."""
    is_watched: bool = False
    """Whether the call's trace was read or listed while the call ran."""
    generation: Generation | None = None
    """The Generation, which runs the request. It is None before the request was parsed, and for
    calls that generate nothing.
    """
    ignored_fields: tuple[str, ...] = ()
    is_stream: bool = False
    directory_state: str = ""
    """The state of the prefix index (a DirectoryState) when the request's processing began."""
    first_token: int | None = None
    """The time when the first token was ready for the client. It is None before the first token."""
    write_nanos: int = 0
    """Total time for which writes of the answer waited for the client to read, in nanoseconds."""
    unix_offset: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    """Number that is added to the record's times to get nanoseconds since 1970."""
    root_span_id: int = field(default_factory=new_span_id)
    generate_span_id: int = field(default_factory=new_span_id)

    log_fields: dict[str, str] = field(init=False)
    """Fields of all log lines about this call."""

    def __post_init__(self) -> None:
        self.log_fields = {
            "request_id": self.request_id,
            "trace_id": f"{self.origin.trace_id:032x}",
        }
        REQUEST_FIELDS.set(self.log_fields)

    @property
    def trace_id(self) -> str:
        return self.log_fields["trace_id"]

    @property
    def answer_id(self) -> str:
        """The request id in answers. Until the request is parsed, it is `request_id`."""
        return self.request_id if self.generation is None else self.generation.request.request_id

    @property
    def trace_headers(self) -> TraceHeaders:
        if not self.origin.is_sampled:
            return TraceHeaders(baggage=self.baggage)
        traceparent = traceparent_text(self.origin.trace_id, self.generate_span_id)
        return TraceHeaders(traceparent, self.origin.tracestate, self.baggage)

    @property
    def seconds(self) -> float:
        """Seconds from the call's arrival to its end, or to now if it has not ended."""
        return ((self.timeline.ended or self.timeline.now()) - self.timeline.began) / 1e9

    def rename(self, request_id: str) -> None:
        self.request_id = self.log_fields["request_id"] = request_id

    def enter(self, part: Part) -> None:
        self.timeline.enter(part)

    def wait(self, reason: str) -> None:
        self.timeline.enter(Part.WAIT, {names.ATTR_WAIT_REASON: reason})

    def failed(self, error_type: str, message: str, *, is_failure: bool) -> None:
        """Sets the request's error. Only the first error is kept."""
        if not self.error_type:
            self.error_type, self.error_message = error_type, message
            self.is_failure = is_failure


def new_record(
    call: Call,
    headers: Mapping[str, str],
    request_id: str,
    origin: TraceOrigin,
    baggage: str,
    arrived: int,
) -> RequestRecord:
    timeline = Timeline(time.perf_counter_ns, Part.ADMIT, arrived)
    return RequestRecord(call, headers, request_id, origin, timeline, baggage)


def is_failure(error: errors.StepwellError) -> bool:
    """Whether an error counts as the server's. Errors of the client, and refusals by a full server,
    do not count. A refusal after the request has waited in a queue counts as the server's error.
    """
    if isinstance(error, errors.ResourceExhausted):
        return error.error_reason == _QUEUE_TIMEOUT
    return isinstance(error, _FAILURES)
