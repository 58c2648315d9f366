"""An event loop whose clock jumps to the next timer.

Callbacks run in the order of `call_soon`, as in asyncio. Messages, connections, executor results
and timers are delayed by times that are drawn from the seed. Therefore the seed decides the order
in which independent sources proceed.

Running code takes no virtual time, except for a function of a lane (`lane.py`) that sleeps.
"""

import asyncio
import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from services.simulation.runtime.process import PROCESS, Process, State

EPOCH = 1_800_000_000.0
"""The time of day when a run begins, in seconds since 1970."""
_LATENESS_SECONDS = 0.0002
"""Limit on how late a timer runs."""
_EXECUTOR_SECONDS = 0.001
"""Limit on the time until the result of a function in an executor is available."""
_CALLBACKS_WITHOUT_TIME = 100_000


class NothingHappens(RuntimeError):
    """All tasks wait, but no timer and no message is due that could wake one."""


class Livelock(RuntimeError):
    """The clock stands still, because callbacks cause further callbacks without end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with a seed. It has no sockets. Other modules provide the network in memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._rngs: dict[tuple[str, ...], random.Random] = {}
        self.lane: Any = None
        """The lane whose function runs now."""
        self.fiber: Any = None
        """The Fiber of the lane's function, if the function may wait."""
        self.slept = 0.0
        """Seconds that the lane's running function has slept. It is 0 outside of lanes."""
        self._now = 0.0
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_callbacks = 0
        self._tasks_of = defaultdict[str, "itertools.count[int]"](itertools.count)
        """Counts the tasks of each coroutine function in each process."""
        self._queued: WeakKeyDictionary[ThreadPoolExecutor, deque[Callable[[], None]]]
        self._queued = WeakKeyDictionary()
        """The functions that executors with a single thread have not run yet."""
        self.servers: Any = None
        """The MemoryStreams that create servers and connections of byte streams."""
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    # The clock and the timers.

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
        """Returns a delay that depends only on the seed, the process and `when`."""
        checksum = crc32(f"{self._seed} {_process_name()} {when}".encode())
        return _LATENESS_SECONDS * checksum / 2**32

    def rng_of(self, *source: str) -> random.Random:
        """Returns a source's own random numbers, which do not depend on other sources. So the order
        of simultaneous draws, which differs between versions of Python, does not matter.
        """
        found = self._rngs.get(source)
        if found is None:
            found = self._rngs[source] = random.Random(f"{self._seed} {source}")
        return found

    def call_exactly(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context
    ) -> asyncio.TimerHandle:
        """Like `call_at`, but without a random delay, and also for a time before `time()`, which
        includes the sleep of a running lane (a simulated compute thread).
        """
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers are dropped when they are due."""

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
            raise Livelock(
                f"the virtual clock does not advance beyond {self._now:.6f} s, although callbacks "
                "still run"
            )

    def _jump(self, ready: Any) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise NothingHappens(f"all tasks wait and no timer is set after {self._now:.6f} s")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
            self._num_callbacks = 0
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])

    # Processes.

    def resume(self, process: Process) -> None:
        """Continues a stopped process. Its callbacks that became due run in order: in some cases
        all in one iteration, in others spread over several, because further messages arrive while
        a busy process handles the first.
        """
        rng = self.rng_of("resume", process.name)
        self._run_held(deque(process.resume()), rng, is_spread=rng.random() < 0.5)

    def _run_held(
        self, held: deque[asyncio.Handle], rng: random.Random, *, is_spread: bool
    ) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        while held and not (is_spread and rng.random() < 0.5):
            ready.append(held.popleft())
        if held:
            self.call_soon(lambda: self._run_held(held, rng, is_spread=True))

    # Sets are iterated in the order of hashes, which only the seed may decide. So the hashes of
    # tasks and futures must not depend on addresses.

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self, serial=next(self._serial))

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        context = options.get("context")
        process = PROCESS.get(None) if context is None else context.get(PROCESS)
        name = f"{getattr(process, 'name', '')} {getattr(coroutine, '__qualname__', '')}"
        number = next(self._tasks_of[name])
        own_hash = crc32(f"{name} {number}".encode())
        return _Task(coroutine, process, own_hash, loop=loop, **options)

    # Executors run their functions in the loop.

    def run_in_executor(  # type: ignore[override]
        self, executor: ThreadPoolExecutor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """An executor with a single thread runs its functions in the order of the calls. A function
        whose future was cancelled before it began does not run.
        """
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        queued = deque[Callable[[], None]]()
        if executor is not None and executor._max_workers == 1:
            queued = self._queued.setdefault(executor, queued)
        queued.append(run)
        seconds = self.rng_of("executor", _process_name()).random() * _EXECUTOR_SECONDS
        self.call_later(seconds, self._run_first, queued)
        return future

    @staticmethod
    def _run_first(queued: deque[Callable[[], None]]) -> None:
        queued.popleft()()

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
        """Does nothing: signals are not simulated."""

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Closes a generator that was dropped, in a task of the process that dropped it."""
        process = PROCESS.get(None)
        if not self.is_closed() and (process is None or process.state is not State.DEAD):
            self.call_soon(self.create_task, agen.aclose())

    def _write_to_self(self) -> None:
        """Does nothing, because the loop never sleeps."""

    def _process_events(self, event_list: Any) -> None:
        """Does nothing, because there is no selector."""


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
    """A task with a hash that does not depend on the number of other objects that asyncio creates,
    which differs between versions of Python. TaskGroups cancel their tasks in the order of a set.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        process: Process | None,
        own_hash: int,
        **options: Any,
    ) -> None:
        self._own_hash = own_hash
        self.process = process
        super().__init__(coroutine, **options)
        # Tasks of a killed process stay pending, which asyncio would log.
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._own_hash
