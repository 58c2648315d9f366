"""One call of a client while it is served: its names, its times, and what becomes of it."""

import enum
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from services.common.errors import (
    Aborted,
    InternalError,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.process.logs import REQUEST_FIELDS
from services.common.telemetry import names
from services.common.telemetry.trace_context import new_span_id, traceparent_text
from services.common.telemetry.trace_headers import TraceHeaders
from services.common.telemetry.tracing import TraceOrigin
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.request.generation import Generation
from services.gateway.core.tenant import ANYONE, Tenant
from services.gateway.core.traces.timeline import Part, Timeline

REQUEST_ID, TRACE_ID = "X-Request-Id", "X-Trace-Id"
"""Headers of every answer; in lower case, gRPC's trailing metadata."""
CANCELLED = "cancelled"
"""The error of a request whose client went away."""
CLIENT_CLOSED_REQUEST = "499"
"""The status of an HTTP request whose client left before its answer began, and was sent none."""
_FAILURES = (InternalError, Aborted, Unavailable)
_QUEUE_TIMEOUT = "QUEUE_TIMEOUT"

CALL_RECORD: ContextVar["RequestRecord"] = ContextVar("call_record")
"""The record of the gRPC call that the present task serves. Over HTTP: `request.state.record`."""


CALL_ARRIVAL: ContextVar[Arrival] = ContextVar("call_arrival")
"""What that call is counted as from before its message is read until it has sequences. Over HTTP it
is in the request's state.
"""


class KeptFor(enum.Enum):
    """Why the spans of a request are made."""

    SAMPLED = "sampled"
    FAILED = "failed"
    SLOW = "slow"
    """It took the time that the settings call slow, or longer."""
    SLOWEST = "slowest"
    """It was among the slowest requests of its minute."""
    WATCHED = "watched"
    """Its trace was read or listed while it ran."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a client called, as it stands in the access log."""

    protocol: str
    method: str
    path: str
    client: str
    """Its address; empty over a Unix socket."""


@dataclass(slots=True)
class RequestRecord:
    """What is noted of a call until it ends, for logs, metrics and spans. Times are nanoseconds of
    `time.perf_counter_ns`.
    """

    call: Call
    headers: Mapping[str, str]
    """Headers by their lower-case names; over gRPC, the metadata."""
    request_id: str
    origin: TraceOrigin
    """Its trace, the caller's span, and whether they are sampled."""
    timeline: Timeline
    """Begins with the arrival."""
    baggage: str = ""
    """The client's header, carried through."""
    operation: str = ""
    """The GenAI operation; empty for calls that generate nothing, which have no spans."""
    tenant: Tenant = ANYONE
    status: str = ""
    """HTTP's status code, or gRPC's name of it."""
    error_type: str = ""
    error_message: str = ""
    is_failure: bool = False
    """Whether it ended with an error that is not the client's, and is no refusal of a full server.
    """
    is_watched: bool = False
    """Whether its trace was read or listed while it ran."""
    generation: Generation | None = None
    """None before the request was read, and for calls that generate nothing."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of its body that have no effect."""
    is_stream: bool = False
    directory_state: str = ""
    """How much was known of the replicas' caches when it began to be served; see DirectoryState."""
    first_token: int | None = None
    """When the first token was there for the client; None before."""
    write_nanos: int = 0
    """What the client's reading took of the time, as far as that held up what is sent to it."""
    unix_offset: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    """Offset of its times to nanoseconds since 1970."""
    root_span_id: int = field(default_factory=new_span_id)
    generate_span_id: int = field(default_factory=new_span_id)

    log_fields: dict[str, str] = field(init=False)
    """Fields of all log lines about it."""

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
        """The request's name in answers; before there can be any, its own."""
        return self.request_id if self.generation is None else self.generation.request.request_id

    @property
    def trace_headers(self) -> TraceHeaders:
        """What goes along with the sequences."""
        if not self.origin.is_sampled:
            return TraceHeaders(baggage=self.baggage)
        traceparent = traceparent_text(self.origin.trace_id, self.generate_span_id)
        return TraceHeaders(traceparent, self.origin.tracestate, self.baggage)

    @property
    def seconds(self) -> float:
        """Time from its arrival to its end or, before the end, to now."""
        return ((self.timeline.ended or self.timeline.now()) - self.timeline.began) / 1e9

    def rename(self, request_id: str) -> None:
        """Takes the name that the client gives the request in its body."""
        self.request_id = self.log_fields["request_id"] = request_id

    def enter(self, part: Part) -> None:
        self.timeline.enter(part)

    def wait(self, reason: str) -> None:
        """Notes that the request waits here, for what the reason names."""
        self.timeline.enter(Part.WAIT, {names.ATTR_WAIT_REASON: reason})

    def failed(self, error_type: str, message: str, *, is_failure: bool) -> None:
        """Notes the error with which the request ends; the first one counts."""
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
    """The record of a call that arrived at that time."""
    timeline = Timeline(time.perf_counter_ns, Part.ADMIT, arrived)
    return RequestRecord(call, headers, request_id, origin, timeline, baggage)


def is_failure(error: StepwellError) -> bool:
    """Whether an error is the server's: not the client's own, and not a refusal of a full server,
    unless the request had waited for its turn before.
    """
    if isinstance(error, ResourceExhausted):
        return error.error_reason == _QUEUE_TIMEOUT
    return isinstance(error, _FAILURES)
