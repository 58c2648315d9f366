"""The one thread that touches tensors, and one that waits for what a device brings back.

The event loop stays free while it computes, so that the next step's message is already decoded when
the step before ends; and one thread means one team of the processor's workers. Waiting apart from
it leaves it free to queue the next step.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other, in the order they came."""

    def __init__(self) -> None:
        self._computing = _Lane("compute")
        self._waiting = _Lane("download")

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is begun."""
        return self._computing.is_closed

    @property
    def overdue(self) -> "Overdue | None":
        """What runs for longer than it may, if anything does. May be asked from any thread."""
        return self._computing.overdue or self._waiting.overdue

    def submit(
        self, function: Callable[[], T], allowed_seconds: float = inf
    ) -> "asyncio.Future[T]":
        """Queues `function`; its result or exception as a future of the running loop. Cancelled
        before it began, it is not run. It is not ended after the allowed time, but `overdue` then.
        """
        return self._computing.submit(function, allowed_seconds)

    def submit_wait(
        self, wait: Callable[[], T], allowed_seconds: float = inf
    ) -> "asyncio.Future[T]":
        """As `submit`, for what only waits: behind other such, beside what computes."""
        return self._waiting.submit(wait, allowed_seconds)

    def close(self, patience_seconds: float | None = None) -> None:
        """Drops what is queued, and waits for what runs: for ever, or so long."""
        self._computing.close(patience_seconds)
        self._waiting.close(patience_seconds)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A function that runs for longer than it may. `began` is of `time.monotonic`."""

    began: float
    allowed_seconds: float


class _Lane:
    """A thread and what it is to do. It does less between two functions than an executor (40 µs
    instead of 65 with everything around it at work): to steps that queue up that time is lost.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_closed = False
        self._running: Overdue | None = None
        """What runs and may not run for ever."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def overdue(self) -> Overdue | None:
        running = self._running
        if running is None or time.monotonic() < running.began + running.allowed_seconds:
            return None
        return running

    def submit(self, function: Callable[[], T], allowed_seconds: float) -> "asyncio.Future[T]":
        if self.is_closed:
            raise RuntimeError("the thread is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            if self.is_closed or future.cancelled():
                _tell(loop, future.cancel)
                return
            if allowed_seconds != inf:
                self._running = Overdue(time.monotonic(), allowed_seconds)
            try:
                result = function()
            except BaseException as error:
                self._running = None
                _tell(loop, _fail, future, error)
            else:
                self._running = None
                _tell(loop, _resolve, future, result)

        self._tasks.put(run)
        return future

    def close(self, patience_seconds: float | None) -> None:
        self.is_closed = True
        self._tasks.put(None)
        self._thread.join(patience_seconds)

    def _work(self) -> None:
        while (run := self._tasks.get()) is not None:
            run()
            del run  # and with it what the function holds


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Calls back in the loop; where it has ended nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
