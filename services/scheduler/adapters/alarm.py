"""A timer that does not blame others for time in which this process stood still."""

import asyncio
from collections.abc import Callable

_LATE_SECONDS = 0.2
_GRACE_SECONDS = 1.0


class Alarm:
    """Calls `ring` after so many seconds, unless cancelled before.

    When the event loop comes to it late, it did not run meanwhile, and what it waits for may be
    there, unread: then it gets another second. Costs little more than the loop's bare timer, a
    tenth of `asyncio.timeout`.
    """

    __slots__ = ("_due", "_loop", "_ring", "_timer")

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._rings)

    def cancel(self) -> None:
        """It does not ring any more."""
        self._timer.cancel()

    def _rings(self) -> None:
        now = self._loop.time()
        if now - self._due > _LATE_SECONDS:
            self._due = now + _GRACE_SECONDS
            self._timer = self._loop.call_at(self._due, self._rings)
        else:
            self._ring()
