"""The simulated device. Work that is queued on it takes time, one piece after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

_LONGEST_SLEEP_SECONDS = 60.0


@dataclass(eq=False)
class SimulatedDevice:
    """Computes when the work of steps ends, by `clock` in seconds. A piece of work starts when its
    step was queued and the previous piece has ended. Therefore the time between steps does not
    depend on how late a thread wakes up.

    `sleep` waits for about a number of seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    slowness: float = 1.0
    """The factor by which the duration of queued work is multiplied."""
    ends: float = -inf
    """The time, by `clock`, at which all queued work ends."""
    _queued: float = -inf
    """The time at which the current step was queued, or at which its input arrived."""
    _starts: float | None = None
    """The start of the current step's first piece of work, or None if none is queued yet."""

    def begin_step(self) -> None:
        """Starts a new step, to which all work belongs that is queued from now on."""
        self._queued, self._starts = self.clock(), None

    def received(self) -> None:
        """Delays the current step's work to the present, because its input has arrived only now."""
        self._queued = self.clock()

    def queue(self, seconds: float) -> None:
        starts = max(self._queued, self.ends)
        if self._starts is None:
            self._starts = starts
        self.ends = starts + seconds * self.slowness

    @property
    def starts(self) -> float:
        return self._queued if self._starts is None else self._starts

    def wait_until(self, end: float) -> None:
        while (left := end - self.clock()) > 0:
            self.sleep(min(left, _LONGEST_SLEEP_SECONDS))
