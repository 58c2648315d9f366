"""The simulated device, which does the work that is queued on it, one piece after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

_LONGEST_SLEEP_SECONDS = 60.0


@dataclass(eq=False)
class SimulatedDevice:
    """Computes when the work of steps ends. A piece of work starts when its step was queued and the
    previous piece has ended. Therefore the time between steps does not depend on how late a thread
    wakes up.

    `clock` returns seconds, and `sleep` waits for about a number of seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    slowness: float = 1.0
    """The factor by which the duration of queued work is multiplied."""
    ends: float = -inf
    """The time, by `clock`, at which all queued work ends."""
    _queued: float = -inf
    """The time at which the current step was queued."""
    _starts: float | None = None
    """The time at which the current step's first piece of work starts. None before it is queued."""

    def begin_step(self) -> None:
        """Starts a new step, to which the work queued from now on belongs."""
        self._queued, self._starts = self.clock(), None

    def received(self) -> None:
        """Delays the step's work until now, because its input has arrived only now."""
        self._queued = self.clock()

    def queue(self, seconds: float) -> None:
        """Queues work that takes `seconds`."""
        starts = max(self._queued, self.ends)
        if self._starts is None:
            self._starts = starts
        self.ends = starts + seconds * self.slowness

    @property
    def starts(self) -> float:
        """The time at which the current step's work starts."""
        return self._queued if self._starts is None else self._starts

    def wait_until(self, end: float) -> None:
        """Waits until the time `end`. Callable from any thread."""
        while (left := end - self.clock()) > 0:
            self.sleep(min(left, _LONGEST_SLEEP_SECONDS))
