"""The stays of a sequence at replicas. A stay begins when the sequence is sent."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.telemetry import names
from services.common.telemetry.time_parts import TimePart
from services.gateway.core.fleet.route import Route
from services.gateway.core.traces.timeline import Part, Timeline

_SPANS = 64
"""The first 64 stays of a sequence have their own span ids."""


class ResubmitCause(enum.Enum):
    """The cause for which a sequence is sent again. If a replica refused it, the cause is the
    error's reason instead.
    """

    SCHEDULER_LOST = "scheduler_lost"
    """The session ended, since the scheduler died or hung."""
    SCHEDULER_DRAINED = "scheduler_drained"
    """The session of a draining scheduler ended before the sequence did."""
    CANNOT_RUN_STEPS = "cannot_run_steps"
    """The replica's pool or workers were unavailable for too long."""
    PREEMPTED = "preempted"
    """It was preempted for a tenant below its share."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The times of a sequence at its last replica, in seconds."""

    queue: float
    prefill: float
    decode: float
    interrupted: float
    """The part of prefill and decode in which the sequence did not run."""
    queued_unix_nanos: int | None = None
    """Unix time of its arrival at the replica in nanoseconds, by the replica's clock."""
    parts: tuple[TimePart, ...] = ()
    """The whole time divided into parts; empty if the replica did not report them."""

    @property
    def inference(self) -> float:
        return self.prefill + self.decode

    @property
    def nanos(self) -> int:
        """The nanoseconds from its arrival at the replica to its end."""
        return round((self.queue + self.inference) * 1e9)


@dataclass(slots=True)
class SequenceTrace:
    """The timeline of one sequence, and the times that its last replica reported."""

    index: int
    request_id: str
    nanos: Callable[[], int]
    num_sent: int = 0
    """Number of times it was sent to a replica."""
    times: EngineTimes | None = None
    admitted: int | None = None
    """When it was scheduled at its current replica; None before."""
    first_token: int | None = None
    """When the first token from its current replica arrived; None before."""
    stays: dict[str, int] = field(default_factory=dict)
    """Maps a replica's address to the span number of the last stay there."""
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.nanos, Part.ROUTE)

    @property
    def span_number(self) -> int:
        """Number of the span of its last stay, unique within the request; from 1 on."""
        return engine_span_number(self.index, self.num_sent)

    def sent(self, route: Route) -> None:
        self.num_sent += 1
        self.admitted = self.first_token = None
        if self.num_sent <= _SPANS:
            self.stays[route.address] = self.span_number
        self.timeline.explain(route.details())
        self.timeline.enter(Part.ENGINE, {names.ATTR_ROUTING_REPLICA: route.address})

    def left(self, cause: ResubmitCause) -> None:
        """Marks the sequence as taken away from its replica, to be sent again."""
        self._resubmitted(cause.value, cause.value)

    def refused(self, error: StepwellError) -> None:
        """Marks the sequence as refused by a replica, to be sent again."""
        self._resubmitted(error.error_reason.lower(), "refused")

    def found_no_replica(self) -> None:
        """Marks the sequence as waiting for a replica."""
        if self.timeline.part is not Part.RESUBMIT:
            self.timeline.enter(Part.WAIT, {names.ATTR_WAIT_REASON: "no_replica"})

    def _resubmitted(self, cause: str, outcome: str) -> None:
        self.timeline.enter(Part.RESUBMIT, {names.ATTR_RESUBMIT_CAUSE: cause}, outcome)


def engine_span_number(index: int, num_sent: int) -> int:
    """The span number of a sequence that was sent `num_sent` times; from 1 on."""
    return 1 + index * _SPANS + min(num_sent, _SPANS) - 1
