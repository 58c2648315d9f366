"""Adds details to the open phase of a request's timeline: wait reasons to a waiting phase, the
unfinished chunk to a prefill, and the sums over its steps to a decode phase. To describe a phase
that continues, the caller passes a copy of the timeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.telemetry import names
from services.scheduler.adapters.telemetry.own_waits import OwnWait, overlay
from services.scheduler.adapters.telemetry.step_sums import StepSums
from services.scheduler.adapters.telemetry.wait_reasons import WaitReasons, WaitStart
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.phase_parts import Chunk, ReasonStart
from services.scheduler.core.timelines.timeline import PhaseKind, Timeline


@dataclass(slots=True, eq=False)
class Tracked:
    request: Request
    timeline: Timeline
    waiting: WaitStart | None
    """The state of the queue when the request began to wait. None if it does not wait."""


@dataclass(frozen=True, slots=True)
class PhaseEnds:
    """Completes phases with sums over steps and with the wait reasons of the queue."""

    sums: StepSums
    reasons: WaitReasons

    def fill_in(self, tracked: Tracked, end: int, now: int, own: Sequence[OwnWait]) -> None:
        """Adds the details of the timeline's open phase, which ends at time `end`. If `end` is
        before `now`, adds a pause of the engine after it. In the waits `own`, steps skipped this
        request.
        """
        timeline = tracked.timeline
        match timeline.current.kind:
            case PhaseKind.DECODE:
                self._decode(tracked)
            case PhaseKind.PREFILL:
                self._prefill(timeline, end)
            case _ if tracked.waiting is not None:
                timeline.wait(overlay(_reason_starts(self.reasons, tracked.waiting), own), now)
        if end < now:
            timeline.enter(PhaseKind.PAUSE, end)

    def _decode(self, tracked: Tracked) -> None:
        phase, sums = tracked.timeline.current, self.sums
        phase.totals = sums.totals.minus(phase.totals)
        phase.last_step = sums.last_step
        phase.max_requests = sums.max_requests_since(phase.first_step)
        phase.num_output_tokens = tracked.request.num_output_tokens - phase.num_output_tokens

    def _prefill(self, timeline: Timeline, end: int) -> None:
        """Adds the chunk of the step in flight, if any, as an unfinished chunk."""
        last_step = self.sums.last_step
        timeline.current.last_step = last_step
        if end > timeline.covered_until:
            start = min(self.sums.last_done_nanos, end)
            cut = Chunk(start, end, last_step + 1, last_step + 1, 0, 0, 0, 0, 0)
            timeline.add_chunk(cut, names.WAIT_STEP_AHEAD)


def _reason_starts(reasons: WaitReasons, waiting: WaitStart) -> Sequence[ReasonStart]:
    """The reasons for which the whole queue waited, each with its start time."""
    changes = reasons.changes_since(waiting)
    starts = [
        ReasonStart(change.unix_nanos, change.reason.value, change.step, change.holder)
        for change in changes
    ]
    if changes and changes[0].unix_nanos == waiting.unix_nanos:
        return starts
    first = names.WAIT_NEXT_STEP
    if reasons.has_forgotten(waiting) and (steps := reasons.steps_since(waiting)):
        first = max(steps, key=steps.__getitem__).value
    return [ReasonStart(waiting.unix_nanos, first), *starts]
