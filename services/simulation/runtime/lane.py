"""The compute thread of a worker, in the event loop."""

from collections import deque
from collections.abc import Callable

from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.process import PROCESS


class VirtualLane:
    """Runs functions one after the other, as callbacks of the loop. If a function sleeps, the
    next one begins later by this time, and its end is reported later by this time.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._context = PROCESS.get().context
        self._functions: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def put(self, function: Callable[[], None] | None) -> None:
        """Queues a function. None, which ends a thread, is ignored."""
        if function is not None:
            self._functions.append(function)
            if not self._is_busy:
                self._is_busy = True
                self._loop.call_later(0.0, self._run, context=self._context)

    def join(self, patience_seconds: float | None) -> None:
        """Does nothing: there is no thread, and queued functions still run."""

    def _run(self) -> None:
        loop, function = self._loop, self._functions.popleft()
        loop.is_in_lane = True
        try:
            function()
        finally:
            free = loop.time()
            loop.is_in_lane, loop.slept = False, 0.0
        loop.call_exactly(free, self._next, context=self._context)

    def _next(self) -> None:
        if self._functions:
            self._run()
        else:
            self._is_busy = False
