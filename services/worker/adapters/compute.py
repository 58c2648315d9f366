"""Runs steps in a compute thread, waits for device outputs in a download thread, and detects steps
that hang.

The event loop is not blocked while a step runs, so it decodes the next step's message before the
step ends. A single thread computes, because each computing thread would start its own OpenMP
threads. The download thread waits for outputs, so that the compute thread can queue the next step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Protocol, TypeVar

from services.common.process.watchdog.proc import watch_self
from services.common.process.watchdog.silence import Reading, Silence

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LIVENESS_PERIOD_SECONDS = 0.25


class FunctionQueue(Protocol):
    """Calls functions in the order of `put`, one after the other."""

    @property
    def put(self) -> Callable[[Callable[[], None] | None], None]:
        """Queues a function. None ends the queue after all earlier functions."""

    def join(self, patience_seconds: float | None) -> None:
        """Waits until the queue has ended, at most for `patience_seconds`."""


class _ThreadQueue:
    """Runs queued functions in a thread. Between two functions it needs 40 µs while all services
    are busy, where an executor needs 65 µs.
    """

    def __init__(self, name: str) -> None:
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.put: Callable[[Callable[[], None] | None], None] = self._functions.put
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def join(self, patience_seconds: float | None) -> None:
        self._thread.join(patience_seconds)

    def _work(self) -> None:
        while (run := self._functions.get()) is not None:
            run()
            del run  # frees the objects that the function references


class ComputeThread:
    """Runs functions in a compute thread and a download thread, each in the order of submission."""

    def __init__(self, queues: Callable[[str], FunctionQueue] = _ThreadQueue) -> None:
        """`queues` creates a queue with a thread name. By default each queue runs a thread."""
        self._computing = _Lane(queues("compute"))
        self._waiting = _Lane(queues("download"))

    @property
    def is_closed(self) -> bool:
        return self._computing.is_closed

    @property
    def overdue(self) -> "Overdue | None":
        """The running function that exceeds its time limit, if any. Callable from any thread."""
        return self._computing.overdue or self._waiting.overdue

    def submit(
        self,
        function: Callable[[], T],
        allowed_seconds: float = inf,
        ended: Callable[[], object] | None = None,
    ) -> "asyncio.Future[T]":
        """Queues `function`. Returns its result or exception as a future of the running loop.

        A function whose future is cancelled before it starts is not run. A function that exceeds
        `allowed_seconds` continues, and is reported by `overdue`. `ended` is called in the loop
        when the future is done, one loop iteration before the future's own callbacks.
        """
        return self._computing.submit(function, allowed_seconds, ended)

    def post(self, function: Callable[[], None], allowed_seconds: float) -> None:
        """Queues a function that must not raise an error, and returns no future. If the thread is
        closed before the function starts, the function is not run. A function that exceeds
        `allowed_seconds` continues, and is reported by `overdue`.
        """
        self._computing.post(function, allowed_seconds)

    def submit_wait(
        self,
        wait: Callable[[], T],
        allowed_seconds: float = inf,
        ended: Callable[[], object] | None = None,
    ) -> "asyncio.Future[T]":
        """Like `submit`, but in the download thread, for a function that only waits."""
        return self._waiting.submit(wait, allowed_seconds, ended)

    def close(self, patience_seconds: float | None = None) -> None:
        """Drops queued functions. Waits at most `patience_seconds` for a running function."""
        self._computing.close(patience_seconds)
        self._waiting.close(patience_seconds)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A running function and its time limit. `began` is its start, by `time.monotonic`."""

    began: float
    allowed_seconds: float


class _Lane:
    """One of the two threads. Runs functions, and records when the running one began."""

    def __init__(self, tasks: FunctionQueue) -> None:
        self._tasks = tasks
        self.is_closed = False
        self._running: Overdue | None = None
        """The running function, if it has a time limit."""

    @property
    def overdue(self) -> Overdue | None:
        running = self._running
        if running is None or time.monotonic() < running.began + running.allowed_seconds:
            return None
        return running

    def submit(
        self, function: Callable[[], T], allowed_seconds: float, ended: Callable[[], object] | None
    ) -> "asyncio.Future[T]":
        if self.is_closed:
            raise RuntimeError("the thread is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            if self.is_closed or future.cancelled():
                _end_in_loop(loop, future, future.cancel, ended)
                return
            try:
                finish = partial(future.set_result, self._timed(function, allowed_seconds))
            except BaseException as error:
                finish = partial(future.set_exception, error)
            _end_in_loop(loop, future, finish, ended)

        self._tasks.put(run)
        return future

    def post(self, function: Callable[[], None], allowed_seconds: float) -> None:
        if self.is_closed:
            raise RuntimeError("the thread is closed")

        def run() -> None:
            if not self.is_closed:
                self._timed(function, allowed_seconds)

        self._tasks.put(run)

    def _timed(self, function: Callable[[], T], allowed_seconds: float) -> T:
        if allowed_seconds != inf:
            self._running = Overdue(time.monotonic(), allowed_seconds)
        try:
            return function()
        finally:
            self._running = None

    def close(self, patience_seconds: float | None) -> None:
        self.is_closed = True
        self._tasks.put(None)
        self._tasks.join(patience_seconds)


async def follow_liveness(
    compute: ComputeThread,
    set_live: Callable[[bool], Awaitable[None]],
    period_seconds: float = _LIVENESS_PERIOD_SECONDS,
    read: Callable[[float], Reading] | None = None,
) -> None:
    """Checks every `period_seconds` whether a step hangs. Calls `set_live` with False when a step
    begins to hang, and with True when it has ended. Never returns. `read` measures the time for
    which the computing process was able to run. By default this is the current process.

    A step counts as hung if two consecutive checks find it over its time limit, and if the process
    was able to run for at least this time limit. Therefore a step is not reported because its
    process was suspended or because other processes kept the processors busy.
    """
    before, live = None, True
    read = read or watch_self()
    while True:
        await asyncio.sleep(period_seconds)
        overdue = compute.overdue
        if overdue is None or overdue is not before:
            silence = None if overdue is None else Silence(overdue.began)
            hangs = False
        elif silence is not None:
            hangs = silence.look(read(time.monotonic())) >= overdue.allowed_seconds
        before = overdue
        if hangs is not live:
            continue
        live = not hangs
        await set_live(live)
        if overdue is not None:
            logger.error(
                "a step has computed for %.1f s, longer than the expected %.1f s: the worker "
                "reports that it is not live",
                time.monotonic() - overdue.began,
                overdue.allowed_seconds,
            )
        else:
            logger.warning(
                "the step that took too long has ended: the worker reports that it is live again"
            )


def _end_in_loop(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[T]",
    finish: Callable[[], object],
    ended: Callable[[], object] | None,
) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_end, future, finish, ended)


def _end(
    future: "asyncio.Future[T]", finish: Callable[[], object], ended: Callable[[], object] | None
) -> None:
    if not future.done():
        finish()
    if ended is not None:
        ended()
