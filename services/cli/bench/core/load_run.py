"""Sends a load as a closed or an open loop of sessions."""

import asyncio
from collections.abc import Iterable, Iterator

from services.cli.bench.core.budget import Budget
from services.cli.bench.core.ports import Clock, Observer, Server
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.session import Session
from services.cli.bench.core.session_run import SessionRun

_AFTER_FAILURE_SECONDS = 0.1


class LoadRun:
    """One run. `records` has every started request, in starting order.

    A session ends early if one of its requests fails or the budget has no more requests. When the
    run is cancelled, unanswered requests are recorded as interrupted.
    """

    def __init__(
        self, server: Server, clock: Clock, budget: Budget, observer: Observer, *, is_chat: bool
    ) -> None:
        self.records: list[RequestRecord] = []
        self._server = server
        self._clock = clock
        self._budget = budget
        self._observer = observer
        self._is_chat = is_chat

    async def closed_loop(self, sessions: Iterable[Session], num_clients: int) -> None:
        """Runs `num_clients` clients, each of which starts a new session when its last one ends.

        After a failure a client waits for 0.1 s, so that it does not flood a server that rejects
        requests.
        """
        source = iter(sessions)
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._client(source))

    async def open_loop(
        self, arrivals: Iterable[tuple[float, Session]], max_concurrency: int | None
    ) -> None:
        """Starts each session at its arrival time, independently of how many sessions are running.

        While `max_concurrency` requests run, further requests wait in the load generator, and their
        latencies include this wait.
        """
        limit = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        async with asyncio.TaskGroup() as under_way:
            for seconds, session in arrivals:
                number = self._budget.take(seconds)
                if number is None:
                    return
                run = self._session_run(session, limit)
                await self._clock.sleep_until(seconds)
                under_way.create_task(run.run(number, seconds))

    async def _client(self, sessions: Iterator[Session]) -> None:
        for session in sessions:
            run = self._session_run(session, None)
            now = self._clock.now()
            number = self._budget.take(now)
            if number is None:
                return
            if not await run.run(number, now):
                await self._clock.sleep_until(self._clock.now() + _AFTER_FAILURE_SECONDS)

    def _session_run(self, session: Session, limit: asyncio.Semaphore | None) -> SessionRun:
        return SessionRun(
            session,
            self._server,
            self._clock,
            self._budget,
            self._observer,
            limit,
            self.records,
            is_chat=self._is_chat,
        )
