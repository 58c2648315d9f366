"""Ends requests that waited too long, and measures how fast the queue moves."""

import asyncio
from collections.abc import Callable

from services.scheduler.adapters.sessions import Sessions
from services.scheduler.core.engine_core import EngineCore, EngineState
from services.scheduler.core.queue_estimate import QueueEstimate
from services.scheduler.core.request import FinishReason

PERIOD_SECONDS = 0.1


class QueueWatch:
    """Looks at the queue ten times a second, beside the engine's steps. `clock` is the one by which
    requests have their `latest_start`.
    """

    def __init__(
        self,
        engine: EngineCore,
        sessions: Sessions,
        estimate: QueueEstimate,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._estimate = estimate
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            self.look()

    def look(self) -> None:
        """Takes a sample, and ends the requests whose time to be scheduled has passed."""
        now = self._clock()
        if self._engine.state is EngineState.RUNNING:
            self._estimate.sample(
                now,
                num_running=len(self._engine.scheduler.running),
                num_waiting=self._engine.num_waiting,
                num_completed=self._sessions.num_completed,
            )
        else:
            self._estimate.stand_still()
        late = [
            request
            for request in self._engine.unscheduled()
            if request.latest_start is not None and request.latest_start <= now
        ]
        if late:
            self._engine.abort(late, FinishReason.QUEUE_TIMEOUT)
