"""Runs the functions of a worker's compute thread in the event loop."""

import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context

from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.machine import inside, outside
from services.simulation.runtime.process import PROCESS, Exited


class VirtualLane:
    """A compute thread in virtual time. It runs functions one after the other, as callbacks of the
    loop. If a function sleeps, its end and the begin of the next function are delayed by that time.
    """

    def __init__(self, loop: VirtualLoop, *, may_wait: bool = False) -> None:
        """If `may_wait`, functions may call `wait`, and each function runs in a Fiber."""
        self._loop = loop
        self._context = PROCESS.get().context
        self._functions: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._may_wait = may_wait
        self._fiber: Fiber | None = None
        """The Fiber of the function that runs or waits now."""
        self._free = 0.0
        """The time at which the last function ended or began to wait."""
        PROCESS.get().at_end.append(self._kill)

    def put(self, function: Callable[[], None] | None) -> None:
        """Queues a function. None, with which a caller ends a real thread, is ignored."""
        if function is not None:
            self._functions.append(function)
            if not self._is_busy:
                self._is_busy = True
                self._loop.call_later(0.0, self._run, context=self._context)

    def join(self, patience_seconds: float | None) -> None:
        """Does nothing, because there is no thread. Queued functions still run."""

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Called by a function of this lane. Lets other callbacks run until a condition holds, at
        most for `seconds`. Returns whether the condition holds. It is evaluated after each `wake`.
        """
        loop, fiber = self._loop, self._loop.fiber
        assert fiber is not None
        end = loop.time() + seconds
        while not condition():
            if loop.time() >= end:
                return False
            timer = loop.call_at(end, self._go_on, context=self._context)
            with inside(loop):
                fiber.pause()
            timer.cancel()
        return True

    def wake(self) -> None:
        """Makes a waiting function evaluate its condition."""
        when = max(self._loop.time(), self._free)
        self._loop.call_exactly(when, self._go_on, context=self._context)

    def _run(self) -> None:
        function = self._functions.popleft()
        if not self._may_wait:
            self._call(function)
            return
        fiber = self._fiber = Fiber(function, self._context)
        self._call(fiber.go)

    def _go_on(self) -> None:
        if (fiber := self._fiber) is not None:
            self._call(fiber.go)

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function, or continues the Fiber of one."""
        loop = self._loop
        loop.lane, loop.fiber = self, self._fiber
        try:
            function()
        except Exited:
            self._functions.clear()
        finally:
            self._free = loop.time()
            loop.lane, loop.fiber, loop.slept = None, None, 0.0
        if self._fiber is None or self._fiber.has_ended:
            self._fiber = None
            loop.call_exactly(self._free, self._next, context=self._context)

    def _next(self) -> None:
        if self._functions:
            self._run()
        else:
            self._is_busy = False

    def _kill(self) -> None:
        if self._fiber is not None and self._fiber is not self._loop.fiber:
            self._fiber.kill()


class Fiber:
    """Runs a function in a thread, which runs only while the event loop waits for it."""

    def __init__(self, function: Callable[[], None], context: Context) -> None:
        self.has_ended = False
        self._function = function
        self._context = context.copy()
        self._error: BaseException | None = None
        self._is_killed = False
        self._going, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        with outside():
            self._thread.start()

    def go(self) -> None:
        """Runs the function until it pauses or ends. Raises its error."""
        self._going.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the function. Returns after the next `go`. Raises Exited after `kill`."""
        self._paused.release()
        self._going.acquire()
        if self._is_killed:
            raise Exited("killed")

    def kill(self) -> None:
        self._is_killed = True
        self._going.release()
        self._thread.join()

    def _run(self) -> None:
        self._going.acquire()
        try:
            if not self._is_killed:
                self._context.run(self._function)
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._paused.release()
