"""A timer for work of other processes, which does not count time in which they had no CPU."""

import asyncio
from collections.abc import Callable

from services.common.process.watchdog.silence import CONFIRM_SECONDS, Reading, Silence

_LATE_SECONDS = 0.2
_GRACE_SECONDS = 1.0
_SHORTEST_SECONDS = 0.02


class Alarm:
    """Calls `ring` when the time of the last call of `set` has passed, unless `stop` was called
    before. `read` returns measurements of the processes that do the work, from which `Silence`
    computes how much of the time counts. Without `read`, all time counts.

    If the event loop runs the timer late, a reply may have arrived that the loop has not read yet.
    The alarm then waits for another second.

    `set` starts no timer of the event loop if the timer for earlier work still runs. When that
    timer ends, it is started again for the present work. Work that ends in time is not measured.
    """

    __slots__ = (
        *("_allowed", "_began", "_due", "_loop", "_read", "_ring", "_silence", "_timer"),
        *("_timer_due", "excused_seconds"),
    )

    def __init__(
        self, ring: Callable[[], None], read: Callable[[float], Reading] | None = None
    ) -> None:
        self.excused_seconds = 0.0
        """Seconds, since the last call of `set`, in which the processes had no CPU, if measured."""
        self._ring = ring
        self._read = read
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._due: float | None = None
        self._began = self._allowed = 0.0
        self._silence: Silence | None = None

    def set(self, seconds: float) -> None:
        """Sets the alarm to ring in `seconds`, in place of an earlier time."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        began = self._began = loop.time()
        self._allowed = seconds
        due = self._due = began + seconds
        self._silence = None
        self.excused_seconds = 0.0
        if self._timer is None:
            self._begin(loop, due)
        elif due < self._timer_due:
            self._timer.cancel()
            self._begin(loop, due)

    def stop(self) -> None:
        self._due = None

    def _begin(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer_due = due
        self._timer = loop.call_at(due, self._ended, loop)

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the event loop's timer. The alarm may have been stopped, or set anew."""
        self._timer = None
        now, due = loop.time(), self._due
        if due is None:
            return
        if now - due > _LATE_SECONDS:
            due = self._due = now + _GRACE_SECONDS
        elif now >= due and self._read is not None:
            due = self._due = now + self._more_seconds(self._read(now))
        if now < due:
            self._begin(loop, due)
        else:
            self._due = None
            self._ring()

    def _more_seconds(self, reading: Reading) -> float:
        """Seconds until the next measurement. 0 if the alarm must ring."""
        if self._silence is None:
            self._silence = Silence(self._began)
        counted = self._silence.look(reading)
        self.excused_seconds = reading.now - self._began - counted
        if counted >= self._allowed:
            return 0.0
        return min(max(self._allowed - counted, _SHORTEST_SECONDS), CONFIRM_SECONDS)
