"""Streams of transactions. A pool accepts transactions only from its newest stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from services.common.pool.ids import PoolId
from services.kvpool.core.errors import TakenOver

Message = TypeVar("Message")


class TransactStream:
    """One client's stream of transactions, which a newer stream may end at any time. The stream
    belongs to the task that created it. `take_over` cancels this task if it is waiting for the
    client. If the task is applying a transaction, the stream ends at its next read.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._is_reading = False
        self._is_taken_over = False

    async def read(self, messages: AsyncIterator[Message]) -> Message | None:
        """Returns the client's next message. None at the end. Raises TakenOver."""
        message = None
        if not self._is_taken_over:
            message = await self._read_interruptibly(messages)
        if self._is_taken_over:
            raise TakenOver("a newer stream sends the transactions of the pool")
        return message

    def take_over(self) -> None:
        """Ends this stream, because a newer stream replaces it."""
        self._is_taken_over = True
        if self._is_reading and self._task is not None:
            self._task.cancel()

    async def _read_interruptibly(self, messages: AsyncIterator[Message]) -> Message | None:
        self._is_reading = True
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            # Either the client disconnected, which the server handles, or take_over() was called.
            if not self._is_taken_over or self._task is None:
                raise
            self._task.uncancel()
            return None
        finally:
            self._is_reading = False


class PoolStreams:
    def __init__(self) -> None:
        self._streams: dict[PoolId, TransactStream] = {}

    def assign(self, pool_id: PoolId, stream: TransactStream) -> None:
        """Makes `stream` the current stream of a pool and ends the previous one."""
        before = self._streams.get(pool_id)
        if before is stream:
            return
        self._streams[pool_id] = stream
        if before is not None:
            before.take_over()

    def leave(self, stream: TransactStream) -> None:
        for pool_id in [pool for pool, present in self._streams.items() if present is stream]:
            del self._streams[pool_id]
