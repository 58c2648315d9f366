"""Where the time of a request goes at a replica: phases that follow each other without a gap.

A timeline is a few numbers for each phase. It is kept for every request, and becomes spans only if
the request is traced. Its times are nanoseconds since the epoch, which callers pass in.
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
"""Phases of a timeline. Beyond them, the oldest ones after the queue are merged."""


class PhaseKind(Enum):
    """The kinds of phases of a request."""

    QUEUE = "queue"
    """It waits for its first admission."""
    PREFILL = "prefill"
    """Chunks of its tokens are computed until one can be sampled; again after an interruption."""
    DECODE = "decode"
    """It gets tokens."""
    PREEMPTED = "preempted"
    """Its blocks were taken away; it waits to be admitted again."""
    RECOVERY = "recovery"
    """Pool or workers were lost; it waits for others, and to be admitted again."""
    PAUSE = "pause"
    """It keeps its blocks while the engine is paused."""
    SEVERAL = "several"
    """Several phases that were merged, since there were more than MAX_PHASES."""


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
"""The part of a request's time to which a phase belongs, apart from its waits."""


class StepTotals(NamedTuple):
    """Sums over steps. What a request had of them is a difference of two."""

    num_steps: int = 0
    nanos: int = 0
    """From the end of the step before, or from the planning if that was later, to the tokens."""
    compute_nanos: int = 0
    """The part of `nanos` in which the workers computed."""
    prompt_nanos: int = 0
    """The part of `compute_nanos` for tokens of requests in their prefill."""
    num_requests: int = 0
    """Sum of the requests in each step."""

    def plus(self, other: "StepTotals") -> "StepTotals":
        """The sums of both."""
        return StepTotals(*map(add, self, other))

    def minus(self, other: "StepTotals") -> "StepTotals":
        """The sums since the other, earlier one."""
        return StepTotals(*map(sub, self, other))


NO_STEPS = StepTotals()


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why a request stopped running before its end."""

    kind: PhaseKind
    """The kind of the phase that begins with it."""
    cause: str
    step: int | None = None
    """The step whose planning it was a part of; None if it came between steps."""
    preempted_for: str = ""
    """Id of the request that needed the blocks."""
    num_lost_tokens: int = 0
    """Computed tokens that are computed again."""
    message: str = ""
    """The loss, as a sentence."""


@dataclass(slots=True)
class Phase:
    """A part of a request's time."""

    kind: PhaseKind
    start: int
    end: int = 0
    parts: list[Wait | Chunk] = field(default_factory=list)
    """The waits of a waiting phase, the chunks and waits of a prefill; without a gap."""
    interruption: Interruption | None = None
    first_step: int = 0
    last_step: int = 0
    num_output_tokens: int = 0
    """Tokens known at its beginning; once it has ended, the tokens that came in it."""
    totals: StepTotals = NO_STEPS
    """The totals at its beginning; once it has ended, those of its steps."""
    behind: StepTotals = NO_STEPS
    """The same of the steps in it that did not have the request."""
    max_requests: int = 0
    """Largest batch."""
    merged: dict[PhaseKind, int] | None = None
    """Nanoseconds by kind of the phases that were merged into it; None if none were."""
    merged_parts: Sequence[TimePart] = ()
    """The parts of the time of these phases."""

    @property
    def nanos(self) -> int:
        """How long it took."""
        return self.end - self.start

    def time_parts(self) -> list[TimePart]:
        """The parts of its time, once it has ended; their sum is all of it."""
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
    """Where the time of a request went; the first three add up to all of it. vLLM's meaning."""

    queue_nanos: int
    prefill_nanos: int
    decode_nanos: int
    interrupted_nanos: int
    """The part of prefill and decode in which it did not run."""
    queued_unix_nanos: int
    """When it arrived."""
    parts: tuple[TimePart, ...] = ()
    """All of it by what it was spent on."""


@dataclass(slots=True)
class Timeline:
    """The phases of one request; the last one is open until `finish`."""

    queued: int
    phases: list[Phase] = field(init=False)
    current: Phase = field(init=False)
    """The open phase, the last one; also after `finish`."""
    admitted: int | None = None
    """When it was first scheduled; None before."""
    first_token: int | None = None
    """When it came; None before."""
    interrupted_nanos: int = 0
    """Time in which it did not run after its first admission."""

    def __post_init__(self) -> None:
        self.current = Phase(PhaseKind.QUEUE, self.queued)
        self.phases = [self.current]

    @property
    def covered_until(self) -> int:
        """The end of the last part of the open phase."""
        phase = self.current
        return phase.parts[-1].end if phase.parts else phase.start

    def enter(self, kind: PhaseKind, now: int) -> Phase:
        """Ends the open phase and begins another one."""
        now = self._end_phase(now)
        if len(self.phases) >= MAX_PHASES:
            self._merge_oldest()
        self.current = Phase(kind, now)
        self.phases.append(self.current)
        return self.current

    def admit(self, step: int, now: int) -> None:
        """It leaves a queue; its tokens are computed from `step` on."""
        if self.admitted is None:
            self.admitted = now
        self.enter(PhaseKind.PREFILL, now).first_step = step

    def wait(self, changes: Sequence[ReasonStart], now: int) -> None:
        """Explains the open phase up to now by the reasons since its last part, each with its
        beginning.
        """
        if len(changes) == 1:  # as in most phases
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
        """Adds a chunk to the prefill; the time before it is a wait."""
        parts, covered = self.current.parts, self.covered_until
        chunk.end = max(covered, chunk.end)
        chunk.start = min(max(covered, chunk.start), chunk.end)
        if chunk.start > covered:
            parts.append(Wait(covered, chunk.start, {wait_reason: chunk.start - covered}))
        parts.append(chunk)
        if len(parts) >= 2 * MAX_CHUNKS:
            parts[:] = merged_chunks(parts)

    def finish(self, now: int) -> None:
        """The request has ended."""
        self._end_phase(now)

    def times(self) -> RequestTimes:
        """Where the time went, once it has ended."""
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
        """Merges the first two phases after the queue."""
        first, later = self.phases[1:3]
        nanos = first.merged or {first.kind: first.nanos}
        nanos[later.kind] = nanos.get(later.kind, 0) + later.nanos
        parts = added_up([*first.time_parts(), *later.time_parts()])
        several = Phase(PhaseKind.SEVERAL, first.start, later.end, merged=nanos, merged_parts=parts)
        self.phases[1:3] = [several]
