"""Sends a load as a closed or an open loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from services.cli.bench.core.ports import Clock
from services.cli.bench.core.session_run import Budget

_AFTER_FAILURE_SECONDS = 0.1

Run = Callable[[int, float], Awaitable[bool]]
"""Sends a request, or the requests of a session. The arguments are the first request's number and
the time when it should be sent. The result is False if a request failed.
"""


class LoadRun:
    """The loops of one load. A loop ends when no runs are left or no more requests may be sent."""

    def __init__(self, clock: Clock, budget: Budget) -> None:
        self._clock = clock
        self._budget = budget

    async def closed_loop(self, runs: Iterable[Run], num_clients: int) -> None:
        """Runs `num_clients` clients, each of which starts a new run when its last run ends. After
        a failure a client waits for 0.1 s, to spare a server that rejects requests.
        """
        source = iter(runs)
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._client(source))

    async def open_loop(self, arrivals: Iterable[tuple[float, Run]]) -> None:
        """Starts each run at its arrival time, independently of how many runs are in progress."""
        async with asyncio.TaskGroup() as under_way:
            for seconds, run in arrivals:
                number = self._budget.take(seconds)
                if number is None:
                    return
                await self._clock.sleep_until(seconds)
                under_way.create_task(_finish(run, number, seconds))

    async def _client(self, runs: Iterator[Run]) -> None:
        for run in runs:
            now = self._clock.now()
            number = self._budget.take(now)
            if number is None:
                return
            if not await run(number, now):
                await self._clock.sleep_until(self._clock.now() + _AFTER_FAILURE_SECONDS)


async def _finish(run: Run, number: int, seconds: float) -> None:
    await run(number, seconds)
