"""An event loop whose clock jumps to the next timer.

Callbacks run in the order of `call_soon`, as asyncio promises. Messages, connections, results of
executors and timers have a delay that is drawn from the seed. So a seed decides the order in which
independent sources proceed.

Code takes no time. Only a function in a lane (`lane.py`) that sleeps takes time.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any
from zlib import crc32

from services.simulation.runtime.process import PROCESS, Process, State

EPOCH = 1_800_000_000.0
"""The time of day when a run begins, in seconds since 1970."""
_LATENESS_SECONDS = 0.0002
"""Limit on the lateness of a timer."""
_EXECUTOR_SECONDS = 0.001
"""Limit on the time after which the result of an executor is there."""
_CALLBACKS_WITHOUT_TIME = 100_000


class NothingHappens(RuntimeError):
    """All tasks wait for something that no timer and no message will cause."""


class Livelock(RuntimeError):
    """The clock stands still, because callbacks cause further callbacks without end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop with a seed. It has no sockets: network and HTTP are other modules' in-memory ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._rngs: dict[tuple[str, ...], random.Random] = {}
        self.lane: Any = None
        """The lane whose function runs now."""
        self.fiber: Any = None
        """The thread of this function, if it may wait."""
        self.slept = 0.0
        """Seconds that the running lane has slept. It is 0 outside of lanes."""
        self._now = 0.0
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_callbacks = 0
        self.servers: Any = None
        """Creates in-memory servers and connections of byte streams."""
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    # Time.

    @property
    def is_in_lane(self) -> bool:
        return self.lane is not None

    def time(self) -> float:
        return self._now + self.slept

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        due = max(when, self.time()) + self._lateness(when)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (due, next(self._serial), handle))
        return handle

    def _lateness(self, when: float) -> float:
        """It depends on the process and the time alone, and not on the number of timers."""
        checksum = crc32(f"{self._seed} {_process_name()} {when}".encode())
        return _LATENESS_SECONDS * checksum / 2**32

    def rng_of(self, *source: str) -> random.Random:
        """The random numbers of a source. They do not depend on what others draw, nor on the order
        in which sources draw at the same time, which depends on the version of Python.
        """
        found = self._rngs.get(source)
        if found is None:
            found = self._rngs[source] = random.Random(f"{self._seed} {source}")
        return found

    def call_exactly(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context
    ) -> asyncio.TimerHandle:
        """Does the same as `call_at`, without lateness, and even in the past of a lane."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they are due."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self.slept:
            return self.call_at(self.time(), callback, *args, context=context)
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._jump(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or process.state is State.RUNS:
                self._num_callbacks += 1
                handle._run()
            else:
                process.hold(handle)
        if self._num_callbacks > _CALLBACKS_WITHOUT_TIME:
            self._num_callbacks = 0
            raise Livelock(f"the clock stands still at {self._now:.6f} s")

    def _jump(self, ready: Any) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise NothingHappens(f"nothing is due after {self._now:.6f} s")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
            self._num_callbacks = 0
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])

    # Processes.

    def resume(self, process: Process) -> None:
        """Continues a stopped process."""
        self._ready.extend(process.resume())  # type: ignore[attr-defined]

    # Tasks and futures have hashes that do not depend on their addresses, since sets are iterated
    # in the order of hashes.

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self, serial=next(self._serial))

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        return _Task(coroutine, loop=loop, serial=next(self._serial), **options)

    # Executors run their functions in the loop.

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        seconds = self.rng_of("executor", _process_name()).random() * _EXECUTOR_SECONDS
        self.call_later(seconds, run)
        return future

    # The network.

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(2, 1, 6, "", (host, port))]

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any, **__: Any) -> Any:  # type: ignore[override]
        return self.servers.serve(protocol_factory, sock)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: str, port: int, **_: Any
    ) -> Any:
        return await self.servers.connect(protocol_factory, f"{host}:{port}")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Simulated processes are stopped by other means than signals."""

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Ends a generator that was dropped, as a task of the process that dropped it."""
        process = PROCESS.get(None)
        if not self.is_closed() and (process is None or process.state is not State.DEAD):
            self.call_soon(self.create_task, agen.aclose())

    def _write_to_self(self) -> None:
        """The loop never sleeps."""

    def _process_events(self, event_list: Any) -> None:
        """There are no events of a selector."""


def _process_name() -> str:
    process = PROCESS.get(None)
    return "" if process is None else process.name


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: asyncio.AbstractEventLoop, serial: int) -> None:
        self._serial = serial
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._serial


class _Task(asyncio.Task[Any]):
    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, serial: int, **options: Any) -> None:
        self._serial = serial
        context = options.get("context")
        self.process = PROCESS.get(None) if context is None else context.get(PROCESS)
        super().__init__(coroutine, **options)
        # A task of a killed process stays pending.
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._serial
