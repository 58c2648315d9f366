"""Reads the request messages of a gRPC server. The number of concurrent reads is limited, because
each read may occupy the memory of the longest message until its sender has finished.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from services.common.errors import Aborted, InvalidArgument

_SLOTS = 16
_SECONDS_UNDER_PRESSURE = 1.0
"""Time limit in seconds of a read while other reads wait for a slot."""


class MessageReaders:
    """A limited number of slots for reading, assigned in order of arrival."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(_SLOTS)
        self._reads: deque[tuple[float, asyncio.Timeout]] = deque()
        """Start time and timeout of each read that has a slot, the oldest first."""

    async def read(self, messages: AsyncIterator[bytes]) -> bytes:
        """Reads the first message. Raises Aborted if it does not arrive in time, and
        InvalidArgument if there is none.
        """
        if self._slots.locked():
            self._shorten_timeouts()
        try:
            async with self._slots, asyncio.timeout(self._timeout_seconds) as timeout:
                read = (asyncio.get_running_loop().time(), timeout)
                self._reads.append(read)
                try:
                    return await anext(aiter(messages))
                finally:
                    self._reads.remove(read)
        except StopAsyncIteration:
            raise InvalidArgument("there is no message") from None
        except TimeoutError:
            raise Aborted("the message did not come in time", reason="MESSAGE_TOO_SLOW") from None

    def _shorten_timeouts(self) -> None:
        """Limits all current reads to _SECONDS_UNDER_PRESSURE from their start."""
        now = asyncio.get_running_loop().time()
        for began, timeout in self._reads:
            timeout.reschedule(max(now, began + _SECONDS_UNDER_PRESSURE))
