"""Why requests waited, noted once for all of them.

A step notes one reason for all: that of the first request that waits and is not passed over. Those
that are have reasons of their own, which `OwnWaits` keeps. For a request that leaves the queue the
reasons are read that were noted while it was in it: a difference of two counts, and the changes in
between. Times are nanoseconds since the epoch.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from services.scheduler.core.output import OWN_REASONS, SchedulerOutput, WaitReason

MAX_CHANGES = 256
"""Changes of the reason that are remembered, the newest ones."""


@dataclass(frozen=True, slots=True)
class ReasonChange:
    """The reason was another one from this step on."""

    step: int
    unix_nanos: int
    reason: WaitReason
    holder: str = ""
    """Id of the request that had most of what waiting ones lacked then; empty if none had."""


class WaitStart(NamedTuple):
    """When a request began to wait, and the state of `WaitReasons` at that time."""

    next_step: int
    unix_nanos: int
    reason: WaitReason | None
    num_steps: Mapping[WaitReason, int]
    num_changes: int
    holder: str = ""


class WaitReasons:
    """Why the head of the queue waited, step by step."""

    def __init__(self) -> None:
        self.current: WaitReason | None = None
        """After the last step, in a pause or in a recovery; None if no request waited then."""
        self.num_steps: Counter[WaitReason] = Counter()
        """Steps after which requests still waited, by reason. Pause and recovery have no steps."""
        self.passed_over: Counter[WaitReason] = Counter()
        """How many requests the last step passed over, by reason."""
        self._holder = ""
        self._is_paused = False
        self._is_recovering = False
        self._next_step = 0
        self._num_changes = 0
        self._changes: deque[tuple[int, ReasonChange]] = deque(maxlen=MAX_CHANGES)

    def planned(self, plan: SchedulerOutput, now: int) -> None:
        """Notes the reason of a planned step; in a pause, of one whose planning had begun."""
        step, reason = plan.step, plan.wait_reason
        if reason is not self.current:
            self._change(step, reason, now, holder_of(plan))
        if reason is not None:
            self.num_steps[reason] += 1
        self._next_step = step + 1
        if self._is_paused:
            self._change(self._next_step, WaitReason.PAUSED, now)

    def paused(self, now: int) -> None:
        """Notes that no step is planned until `resumed`."""
        if not self._is_paused:
            self._is_paused = True
            if not self._is_recovering:
                self._change(self._next_step, WaitReason.PAUSED, now)

    def resumed(self) -> None:
        """Notes the end of a pause. The next step gives the next reason."""
        if self._is_paused:
            self._is_paused = False
            if not self._is_recovering:
                self.current = None

    def lost(self, now: int) -> None:
        """Notes that pool or workers are away until `recovered`."""
        self._is_recovering = True
        self._change(self._next_step, WaitReason.RECOVERY, now)

    def recovered(self, now: int) -> None:
        """Notes that pool and workers are back. The next step gives the next reason."""
        self._is_recovering = False
        self._change(self._next_step, WaitReason.PAUSED if self._is_paused else None, now)

    def begin(self, now: int) -> WaitStart:
        """The state to keep for a request that begins to wait."""
        return WaitStart(
            self._next_step,
            now,
            self.current,
            dict(self.num_steps),
            self._num_changes,
            self._holder,
        )

    def steps_since(self, waiting: WaitStart) -> Counter[WaitReason]:
        """In how many steps a request was not admitted, by reason."""
        return self.num_steps - Counter(waiting.num_steps)

    def changes_since(self, waiting: WaitStart) -> list[ReasonChange]:
        """Why a request waited, in order, the first reason from when it began to wait."""
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
        """Whether reasons of the beginning of a wait are no longer kept."""
        oldest = self._changes[0][0] if self._changes else self._num_changes
        return oldest > waiting.num_changes

    def _lasted(
        self, waiting: WaitStart, reason: WaitReason, changes: Sequence[ReasonChange]
    ) -> bool:
        """Whether the reason at the time when a request began to wait applied to it too."""
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
    """Id of the request in a step that has most of what those that wait lack: blocks, tokens of the
    step, or, the longest, a place among the running ones. Empty if they lack something else.
    """
    if not plan.requests:
        return ""
    match plan.wait_reason:
        case WaitReason.NO_BLOCKS:
            counts = plan.num_computed_tokens
        case WaitReason.BUDGET:
            counts = plan.num_scheduled_tokens
        case WaitReason.MAX_SEQS:
            return plan.requests[0].request_id
        case _:
            return ""
    return plan.requests[max(range(len(counts)), key=counts.__getitem__)].request_id
