"""The simulated device does the work that is queued on it, one piece after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

_LONGEST_SLEEP_SECONDS = 60.0


@dataclass(eq=False)
class SimulatedDevice:
    """The times at which the work of steps ends. A piece of work starts when its step was queued
    and the piece before it has ended, so the time between steps does not depend on how late a
    thread wakes up.

    `clock` returns seconds, and `sleep` waits for about a number of seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    slowness: float = 1.0
    """Work takes its time, multiplied by this."""
    ends: float = -inf
    """When all queued work ends, by the clock."""
    _queued: float = -inf
    """When the current step was queued."""
    _starts: float | None = None
    """When the current step's first piece of work starts. None before it is queued."""

    def begin_step(self) -> None:
        """The work that is queued from now on belongs to a new step."""
        self._queued, self._starts = self.clock(), None

    def received(self) -> None:
        """The step's work cannot start earlier than now."""
        self._queued = self.clock()

    def queue(self, seconds: float) -> None:
        """Queues work that takes this time."""
        starts = max(self._queued, self.ends)
        if self._starts is None:
            self._starts = starts
        self.ends = starts + seconds * self.slowness

    @property
    def starts(self) -> float:
        """When the current step's work starts."""
        return self._queued if self._starts is None else self._starts

    def wait_until(self, end: float) -> None:
        """Waits until a time. Callable from any thread."""
        while (left := end - self.clock()) > 0:
            self.sleep(min(left, _LONGEST_SLEEP_SECONDS))
