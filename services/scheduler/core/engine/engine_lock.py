"""The lock of the engine loop, which prevents changes of the scheduler during an iteration."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class EngineLock:
    """Each iteration of the engine loop holds this lock, and so does other code while it changes
    the scheduler. `wake` is the event that wakes the loop if it waits for work. `has_steps` returns
    whether steps are in flight.
    """

    def __init__(self, wake: asyncio.Event, has_steps: Callable[[], bool]) -> None:
        self._wake = wake
        self._has_steps = has_steps
        self._condition = asyncio.Condition()
        self._num_waits = 0
        self._num_holds = 0

    @property
    def is_held(self) -> bool:
        """Whether a standstill was requested, so that no step may be planned."""
        return self._num_holds > 0

    async def __aenter__(self) -> None:
        await self._condition.acquire()

    async def __aexit__(self, *_: object) -> None:
        if self._num_waits:
            self._condition.notify_all()
        self._condition.release()

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Releases the lock, and holds it again when `is_over()` returns true. `is_over` is called
        now and after each iteration of the loop. The caller must hold the lock.
        """
        self._num_waits += 1
        try:
            await self._condition.wait_for(is_over)
        finally:
            self._num_waits -= 1

    @asynccontextmanager
    async def standstill(self) -> AsyncIterator[None]:
        """A context manager. Within it, the loop is stopped between two iterations, and no step is
        in flight. The caller may be cancelled, because the loop completes the steps in flight.
        """
        self._num_holds += 1
        self._wake.set()
        try:
            async with self:
                await self.until(lambda: not self._has_steps())
                yield
        finally:
            self._num_holds -= 1
            self._wake.set()


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which is not cancelled with the caller. A cancelled caller waits until `work`
    has ended. Used for transactions with the pool: a cancelled transaction would lose operations,
    and the next transaction would receive its response.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()  # asyncio logs exceptions that are not retrieved
        raise
