"""Where a sequence was, from its start at the fleet to its end."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.telemetry import names
from services.common.telemetry.time_parts import TimePart
from services.gateway.core.fleet.route import Route
from services.gateway.core.traces.timeline import Part, Timeline

_SPANS = 64
"""The first 64 times that a sequence is sent have span ids of their own."""


class ResubmitCause(enum.Enum):
    """Why a sequence leaves a replica without its end. Other causes are the reasons of refusals."""

    SCHEDULER_LOST = "scheduler_lost"
    """The session ended: the scheduler died, or hangs."""
    SCHEDULER_DRAINED = "scheduler_drained"
    """The session of a scheduler that drains ended before the sequence did."""
    CANNOT_RUN_STEPS = "cannot_run_steps"
    """Its pool or its workers were away for too long."""
    PREEMPTED = "preempted"
    """Its place went to another tenant, which had fewer than its share."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Where the time of a sequence at its last replica went, in seconds."""

    queue: float
    prefill: float
    decode: float
    interrupted: float
    """The part of the last two in which it did not run."""
    queued_unix_nanos: int | None = None
    """When it arrived there, by that replica's clock."""
    parts: tuple[TimePart, ...] = ()
    """All of it by what it was spent on; empty where the replica did not report that."""

    @property
    def inference(self) -> float:
        return self.prefill + self.decode

    @property
    def nanos(self) -> int:
        """All of it, from its arrival to its end there."""
        return round((self.queue + self.inference) * 1e9)


@dataclass(slots=True)
class SequenceTrace:
    """The timeline of one sequence, and what its last replica reported of the time there."""

    index: int
    request_id: str
    nanos: Callable[[], int]
    num_sent: int = 0
    """How often the sequence was sent to a replica."""
    times: EngineTimes | None = None
    admitted: int | None = None
    """When it was scheduled at the replica that has it; None before."""
    first_token: int | None = None
    """When that replica's first token came; None before."""
    stays: dict[str, int] = field(default_factory=dict)
    """The addresses of those replicas, and the number of the span of its last stay there."""
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.nanos, Part.ROUTE)

    @property
    def span_number(self) -> int:
        """Tells the span of its last stay at a replica from its request's others; from 1 on."""
        return engine_span_number(self.index, self.num_sent)

    def sent(self, route: Route) -> None:
        self.num_sent += 1
        self.admitted = self.first_token = None
        if self.num_sent <= _SPANS:
            self.stays[route.address] = self.span_number
        self.timeline.explain(route.details())
        self.timeline.enter(Part.ENGINE, {names.ATTR_ROUTING_REPLICA: route.address})

    def left(self, cause: ResubmitCause) -> None:
        """Notes that the sequence left its replica without its end, and is to be sent again."""
        self._resubmitted(cause.value, cause.value)

    def refused(self, error: StepwellError) -> None:
        """Notes that a replica refused the sequence, which is to be sent again."""
        self._resubmitted(error.error_reason.lower(), "refused")

    def found_no_replica(self) -> None:
        """Notes that the sequence waits for a replica."""
        if self.timeline.part is not Part.RESUBMIT:
            self.timeline.enter(Part.WAIT, {names.ATTR_WAIT_REASON: "no_replica"})

    def _resubmitted(self, cause: str, outcome: str) -> None:
        self.timeline.enter(Part.RESUBMIT, {names.ATTR_RESUBMIT_CAUSE: cause}, outcome)


def engine_span_number(index: int, num_sent: int) -> int:
    """The number of the span of a sequence that was sent `num_sent` times; from 1 on."""
    return 1 + index * _SPANS + min(num_sent, _SPANS) - 1
