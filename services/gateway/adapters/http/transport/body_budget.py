"""Bounds the total bytes of large request bodies that are in memory at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.errors import ResourceExhausted

_SMALL_BYTES = 64 * 1024
"""Bodies up to this number of bytes are not counted, because the limit on the number of concurrent
requests suffices to bound their total.
"""


class BodyBudget:
    """A budget of bytes, which `hold` reserves. Waiting calls of `hold` are served in order."""

    def __init__(self, max_bytes: int, max_wait_seconds: float) -> None:
        self._free = self._max_bytes = max_bytes
        self._max_wait_seconds = max_wait_seconds
        self._turn = asyncio.Lock()  # asyncio's locks are first in, first out
        self._freed = asyncio.Event()

    def is_counted(self, num_bytes: int) -> bool:
        """Whether a body of this size is counted. A request with such a body may have to wait."""
        return num_bytes > _SMALL_BYTES

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserves bytes for the `with` block. Raises ResourceExhausted if they are not free in
        time.
        """
        taken = min(num_bytes, self._max_bytes) if self.is_counted(num_bytes) else 0
        if taken:
            await self._take(taken)
        try:
            yield
        finally:
            self._free += taken
            self._freed.set()

    async def _take(self, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(self._max_wait_seconds), self._turn:
                while num_bytes > self._free:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= num_bytes
        except TimeoutError as error:
            raise ResourceExhausted(
                "the server already reads as many large bodies as its memory allows; try again "
                "later",
                reason="TOO_MANY_LARGE_BODIES",
                retry_after_seconds=1.0,
            ) from error
