"""Runs the turns of one session, one after the other."""

import asyncio
import math
from contextlib import nullcontext

from services.cli.bench.core.ports import Clock, Observer, Server
from services.cli.bench.core.record import INTERRUPTED, RequestRecord
from services.cli.bench.core.session import Conversation, Session


class Budget:
    """Numbers the requests of a load and limits them. The first `num_warmups` requests are the
    warm-up and are not measured. After the warm-up, at most `num_requests` requests are sent, for
    at most `seconds`. None means no limit.
    """

    def __init__(self, num_requests: int | None, seconds: float | None, num_warmups: int) -> None:
        self._num_warmups = num_warmups
        self._limit = math.inf if num_requests is None else num_warmups + num_requests
        self._seconds = math.inf if seconds is None else seconds
        self._end = math.inf
        self._num_taken = 0

    def take(self, intended: float) -> int | None:
        """Returns the number of a request that is to be sent at `intended`, or None at a limit."""
        if self._num_taken == self._num_warmups:
            self._end = intended + self._seconds
        if self._num_taken >= self._limit or intended >= self._end:
            return None
        self._num_taken += 1
        return self._num_taken - 1

    def is_warmup(self, number: int) -> bool:
        return number < self._num_warmups


class SessionRun:
    """A running session. It ends early if a request fails or the budget has no more requests.

    The first request is encoded when the object is created, and each later request before the think
    time has passed. Started requests are appended to `records`. `limit` bounds the number of
    concurrent requests. Latencies include the wait for this limit. If the run is cancelled, its
    unfinished request is recorded as interrupted.
    """

    def __init__(
        self,
        session: Session,
        server: Server,
        clock: Clock,
        budget: Budget,
        observer: Observer,
        limit: asyncio.Semaphore | None,
        records: list[RequestRecord],
        *,
        is_chat: bool,
    ) -> None:
        self._session = session
        self._server = server
        self._clock = clock
        self._budget = budget
        self._observer = observer
        self._limit = limit
        self._records = records
        self._conversation = Conversation(is_chat=is_chat)
        self._request = self._encode(0)

    async def run(self, number: int, intended: float) -> bool:
        """Sends a session's requests in order, the first one at once. Returns False on failure."""
        for index, turn in enumerate(self._session.turns):
            if index:
                intended += turn.think_seconds
                taken = self._budget.take(intended)
                if taken is None:
                    return True
                number = taken
                self._request = self._encode(index)
                await self._clock.sleep_until(intended)
            record = self._record(number, index, intended)
            answer = await self._send(record)
            if answer is None or record.ended is None:
                return False
            self._conversation.answered(answer)
            intended = record.ended
        return True

    def _encode(self, index: int) -> bytes:
        turn = self._session.turns[index]
        return self._server.encode(self._conversation.ask(turn), turn.output_len)

    def _record(self, number: int, index: int, intended: float) -> RequestRecord:
        record = RequestRecord(
            number=number,
            session=self._session.number,
            turn=index,
            is_warmup=self._budget.is_warmup(number),
            intended=intended,
            output_len=self._session.turns[index].output_len,
        )
        self._records.append(record)
        return record

    async def _send(self, record: RequestRecord) -> str | None:
        is_last = record.turn == len(self._session.turns) - 1
        try:
            async with self._limit or nullcontext():
                self._observer.began(record)
                try:
                    return await self._server.send(self._request, record, keep_answer=not is_last)
                finally:
                    self._observer.ended(record)
        except asyncio.CancelledError:
            record.failure = INTERRUPTED
            raise
