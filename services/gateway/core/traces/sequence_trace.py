"""Records the stays of a sequence (a request's prompt and one answer) at replicas. A stay begins
when the sequence is sent to a replica.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.telemetry import names
from services.common.telemetry.time_parts import TimePart
from services.gateway.core.routing_decision import RoutingDecision
from services.gateway.core.traces.timeline import Part, Timeline

_SPANS = 64
"""Number of a sequence's stays with span numbers of their own. Later stays share the last
number.
"""


class ResubmitCause(enum.Enum):
    """Why a sequence is sent again. If a replica refused the sequence, the reason of the replica's
    error is recorded instead.
    """

    SCHEDULER_LOST = "scheduler_lost"
    """The session with the scheduler ended, since the scheduler died or hung."""
    SCHEDULER_DRAINED = "scheduler_drained"
    """The session of a draining scheduler ended before the sequence ended."""
    CANNOT_RUN_STEPS = "cannot_run_steps"
    """The replica's KV-cache pool or workers were unavailable for too long."""
    PREEMPTED = "preempted"
    """The gateway preempted the sequence in favor of a tenant with less than its fair share of the
    replicas.
    """


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The times of a sequence at its last replica, in seconds."""

    queue: float
    prefill: float
    decode: float
    interrupted: float
    """Seconds within `prefill` and `decode` in which the sequence did not run."""
    queued_unix_nanos: int | None = None
    """Time when the sequence arrived at the replica, in Unix nanoseconds on the replica's clock."""
    parts: tuple[TimePart, ...] = ()
    """The sequence's whole time at the replica, divided by what the time was spent on."""

    @property
    def inference(self) -> float:
        return self.prefill + self.decode

    @property
    def nanos(self) -> int:
        """Nanoseconds from the sequence's arrival at the replica to its end."""
        return round((self.queue + self.inference) * 1e9)


@dataclass(slots=True)
class SequenceTrace:
    """The timeline of one sequence, and the times that its last replica reported."""

    index: int
    request_id: str
    nanos: Callable[[], int]
    num_sent: int = 0
    times: EngineTimes | None = None
    admitted: int | None = None
    """Time when the current replica scheduled the sequence, on the clock `nanos`."""
    first_token: int | None = None
    """Time when the first token from the current replica arrived, on the clock `nanos`."""
    stays: dict[str, int] = field(default_factory=dict)
    """Maps a replica's address to the span number of the sequence's last stay at the replica."""
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.nanos, Part.ROUTE)

    @property
    def span_number(self) -> int:
        """The span number of the sequence's last stay, which is unique within the request."""
        return engine_span_number(self.index, self.num_sent)

    def sent(self, route: RoutingDecision) -> None:
        self.num_sent += 1
        self.admitted = self.first_token = None
        if self.num_sent <= _SPANS:
            self.stays[route.address] = self.span_number
        self.timeline.explain(route.details())
        self.timeline.enter(Part.ENGINE, {names.ATTR_ROUTING_REPLICA: route.address})

    def left(self, cause: ResubmitCause) -> None:
        """Records that the sequence has left its replica and must be sent again."""
        self._resubmitted(cause.value, cause.value)

    def refused(self, error: StepwellError) -> None:
        self._resubmitted(error.error_reason.lower(), "refused")

    def found_no_replica(self) -> None:
        if self.timeline.part is not Part.RESUBMIT:
            self.timeline.enter(Part.WAIT, {names.ATTR_WAIT_REASON: "no_replica"})

    def _resubmitted(self, cause: str, outcome: str) -> None:
        self.timeline.enter(Part.RESUBMIT, {names.ATTR_RESUBMIT_CAUSE: cause}, outcome)


def engine_span_number(index: int, num_sent: int) -> int:
    """Returns the span number of a sequence's last stay. Span numbers start at 1. `index` is the
    sequence's index in its request, and `num_sent` is the number of the sequence's stays.
    """
    return 1 + index * _SPANS + min(num_sent, _SPANS) - 1
