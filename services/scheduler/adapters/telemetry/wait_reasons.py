"""Records why the requests in the queue wait. Each step has one wait reason for the whole queue:
the reason of the first waiting request that the step does not skip. (A skipped request has its own
reason, which `OwnWaits` records.)

Steps are counted by their reason. The counts at the end of a request's wait, less the counts at its
start, are the numbers of steps for which the request waited for each reason. Changes of the reason
are also stored. Times are Unix nanoseconds.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from services.scheduler.core.output import OWN_REASONS, SchedulerOutput, WaitReason

MAX_CHANGES = 256
"""Limit on the number of stored changes of the reason. Older changes are dropped."""


@dataclass(frozen=True, slots=True)
class ReasonChange:
    """A change of the queue's wait reason. The new reason applies from `step` on."""

    step: int
    unix_nanos: int
    reason: WaitReason
    holder: str = ""
    """Id of the request that held most of the missing blocks or rows. Empty if none did."""


class WaitStart(NamedTuple):
    """When a request began to wait, and the state of `WaitReasons` at that time."""

    next_step: int
    unix_nanos: int
    reason: WaitReason | None
    num_steps: Mapping[WaitReason, int]
    num_changes: int
    holder: str = ""


class WaitReasons:
    """Records for each step why the queue waited."""

    def __init__(self) -> None:
        self.current: WaitReason | None = None
        """The last step's wait reason or None. PAUSED or RECOVERY while no steps are planned."""
        self.num_steps: Counter[WaitReason] = Counter()
        """Maps each reason to its number of steps. PAUSED and RECOVERY have none."""
        self.passed_over: Counter[WaitReason] = Counter()
        """Maps each reason to the number of requests that the last step skipped for it."""
        self._holder = ""
        self._is_paused = False
        self._is_recovering = False
        self._next_step = 0
        self._num_changes = 0
        self._changes: deque[tuple[int, ReasonChange]] = deque(maxlen=MAX_CHANGES)

    def planned(self, plan: SchedulerOutput, now: int) -> None:
        """Records a planned step's reason. A pause may have begun while the step was planned."""
        step, reason = plan.step, plan.wait_reason
        if reason is not self.current:
            self._change(step, reason, now, holder_of(plan))
        if reason is not None:
            self.num_steps[reason] += 1
        self._next_step = step + 1
        if self._is_paused:
            self._change(self._next_step, WaitReason.PAUSED, now)

    def paused(self, now: int) -> None:
        """Records that an operator has paused the engine, until `resumed` is called."""
        if not self._is_paused:
            self._is_paused = True
            if not self._is_recovering:
                self._change(self._next_step, WaitReason.PAUSED, now)

    def resumed(self) -> None:
        """Records the end of the pause. The next step sets the next reason."""
        if self._is_paused:
            self._is_paused = False
            if not self._is_recovering:
                self.current = None

    def lost(self, now: int) -> None:
        """Records that the pool or the workers are lost, until `recovered` is called."""
        self._is_recovering = True
        self._change(self._next_step, WaitReason.RECOVERY, now)

    def recovered(self, now: int) -> None:
        """Records the end of a recovery. The next step sets the next reason."""
        self._is_recovering = False
        self._change(self._next_step, WaitReason.PAUSED if self._is_paused else None, now)

    def begin(self, now: int) -> WaitStart:
        """The present state, to be stored for a request that begins to wait."""
        return WaitStart(
            self._next_step,
            now,
            self.current,
            dict(self.num_steps),
            self._num_changes,
            self._holder,
        )

    def steps_since(self, waiting: WaitStart) -> Counter[WaitReason]:
        """Maps each reason to its number of steps since the start of a wait."""
        return self.num_steps - Counter(waiting.num_steps)

    def changes_since(self, waiting: WaitStart) -> list[ReasonChange]:
        """The reasons for which a request waited, in order, from the start of its wait on."""
        changes: list[ReasonChange] = []
        if waiting.num_changes < self._num_changes:
            newest_first = takewhile(
                lambda numbered: numbered[0] >= waiting.num_changes, reversed(self._changes)
            )
            changes = [change for _, change in newest_first]
            changes.reverse()
        if waiting.reason is not None and self._lasted(waiting, waiting.reason, changes):
            began = ReasonChange(
                waiting.next_step, waiting.unix_nanos, waiting.reason, waiting.holder
            )
            changes.insert(0, began)
        return changes

    def has_forgotten(self, waiting: WaitStart) -> bool:
        """Whether the first reasons of a wait are no longer stored."""
        oldest = self._changes[0][0] if self._changes else self._num_changes
        return oldest > waiting.num_changes

    def _lasted(
        self, waiting: WaitStart, reason: WaitReason, changes: Sequence[ReasonChange]
    ) -> bool:
        """Whether a request waited for `reason`, the queue's reason at the start of its wait."""
        if reason in (WaitReason.PAUSED, WaitReason.RECOVERY):
            return True
        if reason in OWN_REASONS:
            return False
        if self.has_forgotten(waiting):
            return False
        changed_at_once = bool(changes) and changes[0].step == waiting.next_step
        return not changed_at_once and self.num_steps[reason] > waiting.num_steps.get(reason, 0)

    def _change(self, step: int, reason: WaitReason | None, now: int, holder: str = "") -> None:
        self.current, self._holder = reason, holder
        if reason is not None:
            change = ReasonChange(step, now, reason, holder)
            self._changes.append((self._num_changes, change))
            self._num_changes += 1


def holder_of(plan: SchedulerOutput) -> str:
    """Id of the request in the step that holds most of what waiting requests lack. For NO_BLOCKS
    and HEADROOM, this is the request with the most computed tokens. For BUDGET, it has the most
    tokens in the step. For MAX_SEQS, it is the step's first request. For RETAINED, returns a text
    that explains which KV blocks of an ended request are kept. Empty for other reasons.
    """
    if plan.wait_reason is WaitReason.RETAINED:
        return plan.retained
    if not plan.requests:
        return ""
    match plan.wait_reason:
        case WaitReason.NO_BLOCKS | WaitReason.HEADROOM:
            counts = plan.num_computed_tokens
        case WaitReason.BUDGET:
            counts = plan.num_scheduled_tokens
        case WaitReason.MAX_SEQS:
            return plan.requests[0].request_id
        case _:
            return ""
    return plan.requests[max(range(len(counts)), key=counts.__getitem__)].request_id
