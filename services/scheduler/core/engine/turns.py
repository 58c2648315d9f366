"""The turns of the engine loop, and what happens between two of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """A lock that each turn of the loop holds, as does all else that changes the scheduler.

    The end of a turn wakes the callers of `until`. `wake` wakes the loop where it waits for work;
    `has_steps` returns whether steps are in flight.
    """

    def __init__(self, wake: asyncio.Event, has_steps: Callable[[], bool]) -> None:
        self._wake = wake
        self._has_steps = has_steps
        self._condition = asyncio.Condition()
        self._num_waits = 0
        self._num_holds = 0

    @property
    def is_held(self) -> bool:
        """Whether a standstill is wanted: no step is to be planned."""
        return self._num_holds > 0

    async def __aenter__(self) -> None:
        await self._condition.acquire()

    async def __aexit__(self, *_: object) -> None:
        if self._num_waits:
            self._condition.notify_all()
        self._condition.release()

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Within a turn: gives the lock to other turns until `is_over`, called after each one."""
        self._num_waits += 1
        try:
            await self._condition.wait_for(is_over)
        finally:
            self._num_waits -= 1

    @asynccontextmanager
    async def standstill(self) -> AsyncIterator[None]:
        """Holds the loop between turns, with no step in flight. The caller may be cancelled: the
        loop itself takes in the steps that are in flight.
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
