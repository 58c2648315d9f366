"""Records when and why steps skipped single waiting requests. Times are Unix nanoseconds."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import WaitReason, preparation_wait
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.phase_parts import ReasonStart

MAX_WAITS = 256
"""Limit on the number of stored waits of a request. Older waits are dropped."""


@dataclass(frozen=True, slots=True)
class OwnWait:
    """A time from `begin` to `end` in which steps skipped a waiting request for one reason."""

    begin: int
    end: int
    reason: WaitReason


class OwnWaits:
    """Records which requests each step skips. Takes almost no time if a step skips none."""

    def __init__(self) -> None:
        self._last: dict[Request, WaitReason] = {}
        """Maps requests that the last step skipped to the reasons."""
        self._begins: dict[Request, int] = {}
        self._waits: dict[Request, deque[OwnWait]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._last)

    def arrived(self, request: Request, now: int) -> None:
        """Records why a new request waits, if its grammar or adapter must be prepared."""
        if request.grammar is GrammarStatus.COMPILING:
            self._last[request] = preparation_wait(request)
            self._begins[request] = now

    def planned(self, passed_over: Mapping[Request, WaitReason], now: int) -> None:
        if passed_over == self._last:
            return
        for request, reason in self._last.items():
            if passed_over.get(request) is not reason:
                self._close(request, reason, now)
        for request, reason in passed_over.items():
            if self._last.get(request) is not reason:
                self._begins[request] = now
        self._last = dict(passed_over)

    def interrupted(self, now: int) -> None:
        """Ends all waits, because during a pause of the engine all requests wait for the pause."""
        self.planned({}, now)

    def forget(self, request: Request, now: int) -> Sequence[OwnWait]:
        """Removes and returns the waits, in order, of a request that no longer waits."""
        reason = self._last.get(request)
        if reason is not None and request in self._begins:
            self._close(request, reason, now)
        return self._waits.pop(request, ())

    def so_far(self, request: Request, now: int) -> Sequence[OwnWait]:
        """The waits of a request up to now, in order. The last wait may not have ended."""
        waits = tuple(self._waits.get(request, ()))
        reason, begin = self._last.get(request), self._begins.get(request)
        if reason is None or begin is None:
            return waits
        return (*waits, OwnWait(begin, now, reason))

    def _close(self, request: Request, reason: WaitReason, now: int) -> None:
        begin = self._begins.pop(request, None)
        if begin is not None:
            waits = self._waits.setdefault(request, deque(maxlen=MAX_WAITS))
            waits.append(OwnWait(begin, now, reason))


def overlay(starts: Sequence[ReasonStart], own: Sequence[OwnWait]) -> Sequence[ReasonStart]:
    """The reasons for which a request waited, each with its start time.

    `starts` lists the reasons for which the whole queue waited, and `own` the waits in which steps
    skipped this request, both in the order of time. During a wait of `own`, its reason replaces the
    queue's reason.
    """
    if not own:
        return starts
    changes = [
        (0, one) for one in starts if not any(wait.begin <= one.start < wait.end for wait in own)
    ]
    for wait in own:
        of_queue = [one for one in starts if one.start <= wait.end]
        if of_queue:
            changes.append((0, of_queue[-1]._replace(start=wait.end)))
        changes.append((1, ReasonStart(wait.begin, wait.reason.value)))
    changes.sort(key=lambda change: (change[1].start, change[0]))
    return [change for _, change in changes]
