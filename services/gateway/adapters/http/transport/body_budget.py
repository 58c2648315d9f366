"""Bounds the total bytes of large request bodies that are in memory at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from services.common.errors import ResourceExhausted

_SMALL_BYTES = 64 * 1024
"""Bodies up to this number of bytes are not counted, because the limit on the number of concurrent
requests suffices to bound their total.
"""


@dataclass(eq=False)
class _Share:
    """The bytes that a caller has reserved. Its waiting calls are served in order."""

    num_bytes: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """asyncio's locks are first in, first out."""


class BodyBudget:
    """A budget of bytes, which `hold` reserves.

    The slow bodies of one caller must not make other callers wait. Therefore a caller that already
    has reserved bytes gets more only if, afterwards, at least as many bytes are free as the caller
    has reserved (Choudhury and Hahne, 1998). Callers with an empty id are not distinguished, and
    may reserve all bytes.
    """

    def __init__(self, max_bytes: int, max_wait_seconds: float) -> None:
        self._free = self._max_bytes = max_bytes
        self._max_wait_seconds = max_wait_seconds
        self._shares: WeakValueDictionary[str, _Share] = WeakValueDictionary()
        self._freed = asyncio.Event()

    def is_counted(self, num_bytes: int) -> bool:
        """Whether a body of this size is counted. A request with such a body may have to wait."""
        return num_bytes > _SMALL_BYTES

    @asynccontextmanager
    async def hold(self, num_bytes: int, caller_id: str) -> AsyncIterator[None]:
        """Reserves bytes for the `with` block. Raises ResourceExhausted if they are not free in
        time.
        """
        taken = min(num_bytes, self._max_bytes) if self.is_counted(num_bytes) else 0
        share = self._shares.setdefault(caller_id, _Share())
        if taken:
            await self._take(taken, share, is_limited=bool(caller_id))
        try:
            yield
        finally:
            self._free += taken
            share.num_bytes -= taken
            self._freed.set()

    async def _take(self, num_bytes: int, share: _Share, *, is_limited: bool) -> None:
        try:
            async with asyncio.timeout(self._max_wait_seconds), share.turn:
                while self._free - num_bytes < (
                    share.num_bytes + num_bytes if is_limited and share.num_bytes else 0
                ):
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= num_bytes
                share.num_bytes += num_bytes
        except TimeoutError as error:
            raise ResourceExhausted(
                "the server already reads as many large bodies as its memory allows; try again "
                "later",
                reason="TOO_MANY_LARGE_BODIES",
                retry_after_seconds=1.0,
            ) from error
