"""The timeline of a request at a replica: phases that follow each other without a gap. Every
request has a timeline, which stores only a few numbers for each phase. Spans are created from the
timeline only if the request is traced. Times are Unix nanoseconds. `now` is the present time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import add, sub
from typing import NamedTuple

from services.common.telemetry.time_parts import (
    BLOCKS,
    DECODE,
    PREFILL,
    RECOVERY,
    TimePart,
    added_up,
)
from services.scheduler.core.timelines.phase_parts import (
    MAX_CHUNKS,
    Chunk,
    ReasonStart,
    Wait,
    merged_chunks,
    merged_waits,
)

MAX_PHASES = 64
"""Limit on the number of phases. Above it, the oldest phases after the queue phase are merged."""


class PhaseKind(Enum):
    QUEUE = "queue"
    """The request waits for its first admission."""
    PREFILL = "prefill"
    """Tokens are computed until a token can be sampled, after an admission or interruption."""
    DECODE = "decode"
    """Output tokens are sampled."""
    PREEMPTED = "preempted"
    """The request's blocks were freed, and it waits for its next admission."""
    RECOVERY = "recovery"
    """The pool or the workers were lost. The request waits until it is admitted again."""
    PAUSE = "pause"
    """The request keeps its blocks while an operator has paused the engine."""
    SEVERAL = "several"
    """Several merged phases, because there were more than MAX_PHASES."""


_INTERRUPTIONS = (PhaseKind.PREEMPTED, PhaseKind.RECOVERY, PhaseKind.PAUSE)
_UNEXPLAINED = {
    PhaseKind.QUEUE: "step",
    PhaseKind.PREFILL: PREFILL,
    PhaseKind.DECODE: DECODE,
    PhaseKind.PREEMPTED: BLOCKS,
    PhaseKind.RECOVERY: RECOVERY,
    PhaseKind.PAUSE: "pause",
    PhaseKind.SEVERAL: "other",
}
"""Maps kinds of phases to the name of the time part that contains all time outside of waits."""


class StepTotals(NamedTuple):
    """Sums over all steps of the engine so far. A phase's sums are the difference of two totals."""

    num_steps: int = 0
    nanos: int = 0
    """Duration of the steps. A step begins when the previous step ends, or when its planning
    begins, if that is later. It ends when its tokens arrive.
    """
    compute_nanos: int = 0
    """The time within `nanos` in which the workers computed."""
    prompt_nanos: int = 0
    """The time within `compute_nanos` that is attributed to prefill tokens."""
    num_requests: int = 0
    """Number of requests, summed over the steps."""

    def plus(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(*map(add, self, other))

    def minus(self, other: "StepTotals") -> "StepTotals":
        """The sums over the steps after the total `other`."""
        return StepTotals(*map(sub, self, other))


NO_STEPS = StepTotals()


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why a request stopped running before its end."""

    kind: PhaseKind
    """The kind of the phase that the interruption begins."""
    cause: str
    step: int | None = None
    """Number of the step whose planning interrupted the request, if planning did."""
    preempted_for: str = ""
    """Id of the request that needed the blocks, if blocks were missing. Otherwise empty."""
    num_lost_tokens: int = 0
    """Number of computed tokens that must be computed again."""
    message: str = ""
    """A sentence about the loss of the pool or the workers, if that was the cause."""


@dataclass(slots=True)
class Phase:
    kind: PhaseKind
    start: int
    end: int = 0
    parts: list[Wait | Chunk] = field(default_factory=list)
    """The waits of a phase without steps, or the chunks and waits of a prefill, without gaps."""
    interruption: Interruption | None = None
    first_step: int = 0
    last_step: int = 0
    num_output_tokens: int = 0
    """Number of output tokens before the phase. When it has ended, the number in the phase."""
    totals: StepTotals = NO_STEPS
    """While the phase is open, the totals at its start; afterwards, the sums over its steps."""
    behind: StepTotals = NO_STEPS
    """The sums over the steps of the phase that did not contain the request."""
    max_requests: int = 0
    """The largest number of requests in a step of the phase."""
    merged: dict[PhaseKind, int] | None = None
    """Maps the kinds of phases that were merged into this one to nanoseconds, or None."""
    merged_parts: Sequence[TimePart] = ()

    @property
    def nanos(self) -> int:
        return self.end - self.start

    def time_parts(self) -> list[TimePart]:
        """The duration of an ended phase, divided into parts by cause."""
        parts = list(self.merged_parts)
        if self.kind not in (PhaseKind.PREFILL, PhaseKind.DECODE):
            for wait in self.parts:
                if isinstance(wait, Wait):
                    parts += wait.time_parts()
        rest = self.nanos - sum(part.nanos for part in parts)
        if rest:
            parts.append(TimePart(_UNEXPLAINED[self.kind], rest))
        caused = self.interruption
        if caused is not None and caused.preempted_for:
            parts = [
                TimePart(BLOCKS, part.nanos, caused.preempted_for, caused.step)
                if part.name == BLOCKS
                else part
                for part in parts
            ]
        return parts


class RequestTimes(NamedTuple):
    """The parts of a request's total time. The first three are vLLM's, and add up to the total."""

    queue_nanos: int
    prefill_nanos: int
    decode_nanos: int
    interrupted_nanos: int
    """Time, within `prefill_nanos` and `decode_nanos`, in which the request did not run."""
    queued_unix_nanos: int
    """Time at which the request arrived."""
    parts: tuple[TimePart, ...] = ()
    """The total time, divided into parts by cause."""


@dataclass(slots=True)
class Timeline:
    """The phases of one request."""

    queued: int
    phases: list[Phase] = field(init=False)
    current: Phase = field(init=False)
    """The last phase, which is open until `finish` is called."""
    admitted: int | None = None
    """Time of the first admission. None before it."""
    first_token: int | None = None
    """Time at which the first token arrived. None before it."""
    interrupted_nanos: int = 0
    """Time after the first admission in which the request did not run."""

    def __post_init__(self) -> None:
        self.current = Phase(PhaseKind.QUEUE, self.queued)
        self.phases = [self.current]

    @property
    def covered_until(self) -> int:
        """The time up to which the parts of the open phase extend."""
        phase = self.current
        return phase.parts[-1].end if phase.parts else phase.start

    def enter(self, kind: PhaseKind, now: int) -> Phase:
        now = self._end_phase(now)
        if len(self.phases) >= MAX_PHASES:
            self._merge_oldest()
        self.current = Phase(kind, now)
        self.phases.append(self.current)
        return self.current

    def admit(self, step: int, now: int) -> None:
        """Begins the prefill after an admission. `step` is the first step that computes tokens."""
        if self.admitted is None:
            self.admitted = now
        self.enter(PhaseKind.PREFILL, now).first_step = step

    def wait(self, changes: Sequence[ReasonStart], now: int) -> None:
        """Adds waits for the reasons `changes` to the open phase, from its last part to `now`."""
        if len(changes) == 1:  # fast path for most phases
            start, (_, reason, step, holder) = self.covered_until, changes[0]
            if now > start:
                self.current.parts.append(Wait(start, now, {reason: now - start}, step, holder))
            return
        if not changes:
            return
        starts = [max(self.covered_until, min(change.start, now)) for change in changes]
        starts[0] = self.covered_until
        waits = [
            Wait(start, end, {change.reason: end - start}, change.step, change.holder)
            for (start, end), change in zip(pairwise([*starts, now]), changes, strict=True)
            if end > start
        ]
        self.current.parts += merged_waits(waits)

    def add_chunk(self, chunk: Chunk, wait_reason: str) -> None:
        """Adds a chunk to the open prefill. A gap before the chunk becomes a wait."""
        parts, covered = self.current.parts, self.covered_until
        chunk.end = max(covered, chunk.end)
        chunk.start = min(max(covered, chunk.start), chunk.end)
        if chunk.start > covered:
            parts.append(Wait(covered, chunk.start, {wait_reason: chunk.start - covered}))
        parts.append(chunk)
        if len(parts) >= 2 * MAX_CHUNKS:
            parts[:] = merged_chunks(parts)

    def finish(self, now: int) -> None:
        self._end_phase(now)

    def times(self) -> RequestTimes:
        """The request's total time, divided into parts. Only valid after `finish`."""
        end = self.current.end
        admitted = end if self.admitted is None else self.admitted
        first_token = end if self.first_token is None else self.first_token
        return RequestTimes(
            admitted - self.queued,
            first_token - admitted,
            end - first_token,
            self.interrupted_nanos,
            self.queued,
            added_up([part for phase in self.phases for part in phase.time_parts()]),
        )

    def _end_phase(self, now: int) -> int:
        phase = self.current
        phase.end = now = max(now, self.covered_until)
        if phase.kind in _INTERRUPTIONS:
            self.interrupted_nanos += phase.nanos
        return now

    def _merge_oldest(self) -> None:
        first, later = self.phases[1:3]
        nanos = first.merged or {first.kind: first.nanos}
        nanos[later.kind] = nanos.get(later.kind, 0) + later.nanos
        parts = added_up([*first.time_parts(), *later.time_parts()])
        several = Phase(PhaseKind.SEVERAL, first.start, later.end, merged=nanos, merged_parts=parts)
        self.phases[1:3] = [several]
