"""The lock of the engine loop. Prevents changes of the scheduler during an iteration."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class EngineLock:
    """A lock that is held by each iteration of the engine loop, and by all other code that changes
    the scheduler. Each release of the lock wakes the callers of `until`. Setting `wake` wakes the
    loop if it waits for work. `has_steps` returns whether steps are in flight.
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
        """Releases the lock and waits until `is_over()` returns true. `is_over` is called after
        each iteration of the loop. The caller must hold the lock.
        """
        self._num_waits += 1
        try:
            await self._condition.wait_for(is_over)
        finally:
            self._num_waits -= 1

    @asynccontextmanager
    async def standstill(self) -> AsyncIterator[None]:
        """A context in which the loop is stopped between two iterations, with no step in flight.
        The caller may be cancelled, because the loop itself completes the steps in flight.
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
