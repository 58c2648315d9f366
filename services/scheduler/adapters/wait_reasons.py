"""Why requests waited, noted once for all of them.

No request is admitted before the head of the queue, so a step notes one reason for all. For a
request that leaves the queue the reasons are read that were noted while it was in it: a difference
of two counts, and the changes in between.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.scheduler.core.output import WaitReason

MAX_CHANGES = 64
"""Changes of the reason that are remembered, the newest ones."""


@dataclass(frozen=True, slots=True)
class ReasonChange:
    """The reason was another one from this step on."""

    step: int
    unix_nanos: int
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class WaitStart:
    """When a request began to wait, and the state of `WaitReasons` at that time."""

    next_step: int
    unix_nanos: int
    reason: WaitReason | None
    num_steps: Counter[WaitReason]
    num_changes: int


class WaitReasons:
    """Why the head of the queue waited, step by step."""

    def __init__(self, unix_nanos: Callable[[], int] = time.time_ns) -> None:
        self.current: WaitReason | None = None
        """After the last step, or in a pause; None if no request waited then."""
        self.num_steps: Counter[WaitReason] = Counter()
        """Steps after which requests still waited, by reason. A pause has no steps."""
        self._unix_nanos = unix_nanos
        self._is_paused = False
        self._next_step = 0
        self._num_changes = 0
        self._changes: deque[tuple[int, ReasonChange]] = deque(maxlen=MAX_CHANGES)

    def planned(self, step: int, reason: WaitReason | None) -> None:
        """Notes the reason of a planned step; in a pause, of one whose planning had begun."""
        if reason is not self.current:
            self._change(step, reason)
        if reason is not None:
            self.num_steps[reason] += 1
        self._next_step = step + 1
        if self._is_paused:
            self._change(self._next_step, WaitReason.PAUSED)

    def paused(self) -> None:
        """Notes that no step is planned until `resumed`."""
        if not self._is_paused:
            self._is_paused = True
            self._change(self._next_step, WaitReason.PAUSED)

    def resumed(self) -> None:
        """Notes the end of a pause. The next step gives the next reason."""
        if self._is_paused:
            self._is_paused = False
            self.current = None

    def begin(self) -> WaitStart:
        """The state to keep for a request that begins to wait."""
        return WaitStart(
            self._next_step,
            self._unix_nanos(),
            self.current,
            self.num_steps.copy(),
            self._num_changes,
        )

    def steps_since(self, waiting: WaitStart) -> Counter[WaitReason]:
        """In how many steps a request was not admitted, by reason."""
        return self.num_steps - waiting.num_steps

    def changes_since(self, waiting: WaitStart) -> list[ReasonChange]:
        """Why a request waited, in order, the first reason from when it began to wait."""
        changes = [change for number, change in self._changes if number >= waiting.num_changes]
        if waiting.reason is not None and self._lasted(waiting, waiting.reason, changes):
            began = ReasonChange(waiting.next_step, waiting.unix_nanos, waiting.reason)
            changes.insert(0, began)
        return changes

    def _lasted(
        self, waiting: WaitStart, reason: WaitReason, changes: Sequence[ReasonChange]
    ) -> bool:
        """Whether the reason at the time when a request began to wait applied to it too."""
        if reason is WaitReason.PAUSED:
            return True
        if self._num_changes - waiting.num_changes > len(changes):
            return False  # the first changes are no longer kept
        changed_at_once = bool(changes) and changes[0].step == waiting.next_step
        return not changed_at_once and self.num_steps[reason] > waiting.num_steps[reason]

    def _change(self, step: int, reason: WaitReason | None) -> None:
        self.current = reason
        if reason is not None:
            change = ReasonChange(step, self._unix_nanos(), reason)
            self._changes.append((self._num_changes, change))
            self._num_changes += 1
