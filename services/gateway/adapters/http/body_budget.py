"""A bound on the bytes of large bodies that are held at once, of all clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.errors import ResourceExhausted

# Smaller ones are bounded by how many requests are served at once.
_SMALL_BYTES = 64 * 1024


class BodyBudget:
    """Bytes that are given out in the order in which they are asked for."""

    def __init__(self, max_bytes: int, max_wait_seconds: float) -> None:
        self._free = self._max_bytes = max_bytes
        self._max_wait_seconds = max_wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Holds that many bytes. Raises ResourceExhausted when they are not free in time."""
        taken = 0 if num_bytes <= _SMALL_BYTES else min(num_bytes, self._max_bytes)
        await self._take(taken)
        try:
            yield
        finally:
            self._give_back(taken)

    async def _take(self, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        if not self._waiting and num_bytes <= self._free:
            self._free -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_back(num_bytes)  # its turn came together with the error
            else:
                self._waiting.remove(entry)
                self._give_back(0)  # those behind it may fit
            if isinstance(error, TimeoutError):
                raise ResourceExhausted(
                    "large bodies of other requests are being read",
                    reason="TOO_MANY_LARGE_BODIES",
                    retry_after_seconds=1.0,
                ) from error
            raise

    def _give_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            self._free -= wanted
            turn.set_result(None)
