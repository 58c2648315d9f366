"""Who speaks for which pool: the newest stream does."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from services.common.ids import PoolId
from services.kvpool.core.errors import TakenOver

Message = TypeVar("Message")


class TransactStream:
    """One client's stream of transactions, which a newer one may end at any moment.

    It belongs to the task that made it. While that task waits for its client it is woken to end;
    while it is at work it ends when it comes back to read.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._is_reading = False
        self._is_taken_over = False

    async def read(self, messages: AsyncIterator[Message]) -> Message | None:
        """The client's next message, None at the end. Raises TakenOver once a newer one speaks."""
        message = None
        if not self._is_taken_over:
            message = await self._read_interruptibly(messages)
        if self._is_taken_over:
            raise TakenOver("a newer stream speaks for the pool")
        return message

    def take_over(self) -> None:
        """Ends this stream in favour of a newer one."""
        self._is_taken_over = True
        if self._is_reading and self._task is not None:
            self._task.cancel()

    async def _read_interruptibly(self, messages: AsyncIterator[Message]) -> Message | None:
        self._is_reading = True
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            # Either the client went away, which is for the server to deal with, or take_over().
            if not self._is_taken_over or self._task is None:
                raise
            self._task.uncancel()
            return None
        finally:
            self._is_reading = False


class Speakers:
    """The stream that speaks for each pool."""

    def __init__(self) -> None:
        self._streams: dict[PoolId, TransactStream] = {}

    def speak(self, pool_id: PoolId, stream: TransactStream) -> None:
        """Lets `stream` speak for a pool; the one that did before ends."""
        speaker = self._streams.get(pool_id)
        if speaker is stream:
            return
        self._streams[pool_id] = stream
        if speaker is not None:
            speaker.take_over()

    def leave(self, stream: TransactStream) -> None:
        """Forgets a stream that has ended."""
        for pool_id in [pool for pool, speaker in self._streams.items() if speaker is stream]:
            del self._streams[pool_id]
