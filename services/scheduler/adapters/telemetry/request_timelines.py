"""Maintains the timeline (the phases) of every request, when the engine calls its observer. The
time to record a step is proportional to the number of changes, such as prompt chunks, admissions
and ends, because requests that only decode are not updated in each step. When a decode phase ends,
its sums are computed as differences of totals over all steps.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from services.common.telemetry import names
from services.scheduler.adapters.telemetry.own_waits import OwnWait, OwnWaits
from services.scheduler.adapters.telemetry.phase_ends import PhaseEnds, Tracked
from services.scheduler.adapters.telemetry.step_spans import StepSpan
from services.scheduler.adapters.telemetry.step_sums import StepSums
from services.scheduler.adapters.telemetry.wait_reasons import WaitReasons
from services.scheduler.core.output import (
    EngineCoreOutputs,
    Preemption,
    PreemptionCause,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.phase_parts import Chunk, ReasonStart, Wait
from services.scheduler.core.timelines.timeline import (
    Interruption,
    Phase,
    PhaseKind,
    StepTotals,
    Timeline,
)

_LOSSES = (PreemptionCause.POOL_LOST, PreemptionCause.WORKERS_LOST)


@dataclass(slots=True)
class StepRecord:
    """Data about a step, until it is counted. Times are Unix nanoseconds."""

    begun: int
    span: StepSpan | None = None
    """The open span of the step. None if the step is not traced."""
    number: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    done: int = 0
    """Time at which the step's tokens arrived from the workers."""
    compute_nanos: int = 0
    nanos: int = 0
    """Duration of the step, without the time in which the previous step still ran."""
    only_decodes: bool = False
    """Whether the step contains all running requests, and all of them decode."""
    chunks: Sequence[tuple[int, Tracked, Phase, int]] = ()
    """For each request in prefill: its index in the plan, timeline, phase and number of tokens."""
    left_out: Sequence[Phase] = ()
    """Decode phases of running requests that are not part of the step."""


class RequestTimelines:
    def __init__(self, reasons: WaitReasons, wait_nanos: Counter[str]) -> None:
        """`wait_nanos` maps wait reasons to total nanoseconds. Waits are added when they end."""
        self._wait_nanos = wait_nanos
        self.sums = StepSums()
        self._reasons = reasons
        self._ends = PhaseEnds(self.sums, reasons)
        self._live: dict[Request, Tracked] = {}
        self._running: dict[Request, Tracked] = {}
        self._prefilling: dict[Request, Tracked] = {}
        self._paused_at: int | None = None
        self._own_waits = OwnWaits()

    @property
    def requests(self) -> list[Request]:
        return list(self._live)

    def arrived(self, request: Request, now: int) -> Tracked:
        tracked = Tracked(
            request, Timeline(request.queued_unix_nanos or now), self._reasons.begin(now)
        )
        tracked.timeline.current.num_output_tokens = request.num_output_tokens
        if request.hashed_unix_nanos:
            since = [ReasonStart(tracked.timeline.queued, names.WAIT_HASHING)]
            tracked.timeline.wait(since, request.hashed_unix_nanos)
        self._live[request] = tracked
        if request.resumable:
            self._own_waits.forget(request, now)  # removes the wait between two turns
        self._own_waits.arrived(request, now)
        return tracked

    def only_decodes(self, plan: SchedulerOutput) -> bool:
        """Whether all running requests are in the plan and decode, and no request is skipped."""
        return (
            len(plan.requests) == len(self._running)
            and not self._prefilling
            and not (plan.new or plan.resumed or plan.preemptions or plan.passed_over)
            and not self._own_waits.has_any
        )

    def planned(self, plan: SchedulerOutput, step: StepRecord, now: int) -> None:
        """Records which requests a step's plan admits, preempts, leaves out or skips, and which
        have a prompt chunk in it. Must be called before the step's wait reason is recorded.
        """
        for request in (*plan.new, *plan.resumed):
            self._admit(request, plan.step, now)
        for preemption in plan.preemptions:
            self._preempted_for(preemption, plan.step, now)
        if self._prefilling:
            step.chunks = self._chunks(plan)
        if len(plan.requests) < len(self._running):
            step.left_out = self._left_out(plan)
        self._own_waits.planned(plan.passed_over, now)

    def done(
        self, plan: SchedulerOutput, step: StepRecord, update: EngineCoreOutputs, now: int
    ) -> list[Tracked]:
        """Records the tokens of a step. Returns the requests that ended with the step."""
        last_done = self.sums.last_done_nanos
        nanos = step.nanos = max(0, now - max(last_done, step.begun))
        compute, prompt_nanos = min(update.execute_nanos, nanos), 0
        # Other requests have left the prefill, because a token arrived or they were interrupted.
        in_prefill = [chunk for chunk in step.chunks if chunk[1].timeline.current is chunk[2]]
        if in_prefill:
            num_prompt_tokens = sum(num_tokens for *_, num_tokens in in_prefill)
            prompt_nanos = compute * num_prompt_tokens // max(1, step.num_tokens)
        self.sums.add(plan.step, now, nanos, compute, prompt_nanos, len(plan.requests))
        if step.left_out:
            totals = StepTotals(1, nanos, compute, prompt_nanos, len(plan.requests))
            for phase in step.left_out:
                if not phase.end:
                    phase.behind = phase.behind.plus(totals)
        for _, tracked, _, num_tokens in in_prefill:
            chunk = Chunk(
                last_done,
                now,
                plan.step,
                plan.step,
                1,
                num_tokens,
                step.num_tokens,
                len(plan.requests),
                compute,
            )
            tracked.timeline.add_chunk(chunk, names.WAIT_STEP_AHEAD)
        for index, tracked, phase, _ in step.chunks:
            if update.token_ids[index]:
                self._got_tokens(tracked, phase, now)
        return [ended for request in update.ended if (ended := self.end(request, now)) is not None]

    def decoded(self, steps: Iterable[StepRecord]) -> None:
        """Records decode-only steps that ended no request. Must be called before later events."""
        sums = self.sums
        for step in steps:
            nanos = step.nanos = max(0, step.done - max(sums.last_done_nanos, step.begun))
            compute_nanos = min(step.compute_nanos, nanos)
            sums.add(step.number, step.done, nanos, compute_nanos, 0, step.num_requests)

    def end(self, request: Request, now: int) -> Tracked | None:
        """Ends the timeline of a request. Sets `request.times`."""
        tracked = self._live.pop(request, None)
        if tracked is None:
            return None
        self._leave_phase(tracked, now)
        self._running.pop(request, None)
        tracked.timeline.finish(now)
        request.times = tracked.timeline.times()
        return tracked

    def finish_turn(self, session: Request, turn: Request, now: int) -> Tracked | None:
        """Ends the timeline of a session's turn (a session is a request with several turns). `turn`
        is a copy of the session at that time.
        """
        tracked = self._live.get(session)
        if tracked is None:
            return None
        tracked.request = turn
        session.turn_ended_unix_nanos = now
        for of_turn in (self._live, self._running, self._prefilling):
            if session in of_turn:
                of_turn[turn] = of_turn.pop(session)
        return self.end(turn, now)

    def so_far(self, request: Request, now: int) -> Timeline | None:
        """A copy of an unfinished request's timeline, as if the request ended now, or None."""
        tracked = self._live.get(request)
        if tracked is None:
            return None
        copied = replace(tracked, timeline=deepcopy(tracked.timeline))
        own = self._own_waits.so_far(request, now)
        self._ends.fill_in(copied, self._end_of_phase(tracked, now), now, own)
        copied.timeline.finish(now)
        return copied.timeline

    def paused(self, now: int) -> None:
        """Records that an operator has paused the engine. No step is planned from now on."""
        self._own_waits.interrupted(now)
        if self._paused_at is None:
            self._paused_at = now

    def resumed(self, now: int, *, stood_still: bool) -> None:
        """Records that the pause has ended. `stood_still` is false if steps that were planned
        before the pause are still in flight. The running requests then lost no time, so their
        timelines get no pause phase.
        """
        running = self._running.values() if self._paused_at is not None and stood_still else ()
        for tracked in running:
            kind = tracked.timeline.current.kind
            self._leave_phase(tracked, now)
            if tracked.timeline.current.kind is PhaseKind.PAUSE:
                self._enter_running(tracked, kind, now)
        self._paused_at = None

    def preempted(
        self, requests: Iterable[Request], cause: PreemptionCause, now: int, message: str = ""
    ) -> None:
        """Records that running requests were preempted for another cause than missing blocks."""
        kind = PhaseKind.RECOVERY if cause in _LOSSES else PhaseKind.PREEMPTED
        if kind is PhaseKind.RECOVERY:
            self._own_waits.interrupted(now)
        for request in requests:
            self._interrupt(request, Interruption(kind, cause.value, message=message), now)

    def _admit(self, request: Request, step: int, now: int) -> None:
        tracked = self._live.get(request)
        if tracked is None:
            return
        self._leave_phase(tracked, now)
        tracked.timeline.admit(step, now)
        self._running[request] = self._prefilling[request] = tracked

    def _preempted_for(self, preemption: Preemption, step: int, now: int) -> None:
        interruption = Interruption(
            PhaseKind.PREEMPTED,
            PreemptionCause.NO_BLOCKS.value,
            step,
            preemption.cause.request_id,
            preemption.num_lost_tokens,
        )
        self._interrupt(preemption.victim, interruption, now)

    def _interrupt(self, request: Request, interruption: Interruption, now: int) -> None:
        tracked = self._running.get(request)
        if tracked is None:
            return
        timeline, end = tracked.timeline, now
        if interruption.kind is PhaseKind.RECOVERY:
            # The phase ended when the last tokens arrived. Tokens of the lost step do not count.
            end = min(now, max(timeline.covered_until, self.sums.last_done_nanos))
        self._leave_phase(tracked, now if self._paused_at is not None else end)
        if timeline.current.kind is PhaseKind.PAUSE:
            end = now
        timeline.enter(interruption.kind, end).interruption = interruption
        if end < now:
            timeline.wait([ReasonStart(end, names.WAIT_LOST_STEP)], now)
        tracked.waiting = self._reasons.begin(now)
        del self._running[request]

    def _chunks(self, plan: SchedulerOutput) -> list[tuple[int, Tracked, Phase, int]]:
        return [
            (index, tracked, tracked.timeline.current, num_tokens)
            for index, (request, num_tokens) in enumerate(
                zip(plan.requests, plan.num_scheduled_tokens, strict=True)
            )
            if (tracked := self._prefilling.get(request)) is not None
        ]

    def _left_out(self, plan: SchedulerOutput) -> list[Phase]:
        left_out = self._running.keys() - set(plan.requests)
        phases = [self._running[request].timeline.current for request in left_out]
        return [phase for phase in phases if phase.kind is PhaseKind.DECODE]

    def _got_tokens(self, tracked: Tracked, phase: Phase, now: int) -> None:
        """Records the first tokens after a prefill. The request now decodes, unless preempted."""
        if tracked.timeline.first_token is None:
            tracked.timeline.first_token = now
        if tracked.timeline.current is phase:
            self._leave_phase(tracked, now)
            self._enter_running(tracked, PhaseKind.DECODE, now)

    def _enter_running(self, tracked: Tracked, kind: PhaseKind, now: int) -> None:
        phase = tracked.timeline.enter(kind, now)
        phase.first_step = self.sums.last_step + 1
        if kind is PhaseKind.DECODE:
            phase.totals = self.sums.totals
            phase.num_output_tokens = tracked.request.num_output_tokens
        else:
            self._prefilling[tracked.request] = tracked

    def _leave_phase(self, tracked: Tracked, now: int) -> None:
        """Completes the open phase. If the engine's pause delays the request, adds a pause."""
        own: Sequence[OwnWait] = ()
        end = self._end_of_phase(tracked, now)
        if tracked.timeline.current.kind is PhaseKind.PREFILL:
            self._prefilling.pop(tracked.request, None)
        elif tracked.waiting is not None:
            own = self._own_waits.forget(tracked.request, now)
        phase = tracked.timeline.current
        self._ends.fill_in(tracked, end, now, own)
        if tracked.waiting is not None:
            for wait in phase.parts:
                if isinstance(wait, Wait):
                    self._wait_nanos.update(wait.reasons)
        elif end < now:
            self._wait_nanos[WaitReason.PAUSED.value] += now - end
        tracked.waiting = None

    def _end_of_phase(self, tracked: Tracked, now: int) -> int:
        """The end of the open phase: now, or the time from which a pause delays the request."""
        if self._paused_at is None or tracked.request not in self._running:
            return now
        return min(now, max(self._paused_at, self.sums.last_done_nanos))
