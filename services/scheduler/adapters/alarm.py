"""A timer for work that follows work. It allows for time in which the event loop did not run."""

import asyncio
from collections.abc import Callable

_LATE_SECONDS = 0.2
_GRACE_SECONDS = 1.0


class Alarm:
    """Calls `ring` once the time that was set last is over, unless it is stopped before.

    If the event loop calls the timer late, it did not run in between, and an answer may have
    arrived that was not read: then the timer runs for another second. Work that is done in time
    costs no timer of the loop: one that was begun for earlier work runs on, and is begun anew when
    it ends before the time that is set.
    """

    __slots__ = ("_due", "_loop", "_ring", "_timer", "_timer_due")

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._due: float | None = None

    def set(self, seconds: float) -> None:
        """Lets the alarm ring in `seconds`, and not at the time that was set before."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        due = self._due = loop.time() + seconds
        if self._timer is None:
            self._begin(loop, due)
        elif due < self._timer_due:
            self._timer.cancel()
            self._begin(loop, due)

    def stop(self) -> None:
        """The alarm does not ring."""
        self._due = None

    def _begin(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer_due = due
        self._timer = loop.call_at(due, self._ended, loop)

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer ended: work may be late, done, or other work with more time."""
        self._timer = None
        now, due = loop.time(), self._due
        if due is None:
            return
        if now - due > _LATE_SECONDS:
            due = self._due = now + _GRACE_SECONDS
        if now < due:
            self._begin(loop, due)
        else:
            self._due = None
            self._ring()
