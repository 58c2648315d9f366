"""Measures how fast the queue moves, sends it to gateways, and ends requests that wait too long."""

import asyncio
import time

from services.common.queue_state import QueueState
from services.common.replica_load import ReplicaLoad
from services.scheduler.adapters.sessions import Sessions
from services.scheduler.adapters.statistics import StepCounts
from services.scheduler.core.engine_core import EngineCore, EngineState
from services.scheduler.core.queue_estimate import QueueEstimate, expected_tokens

PERIOD_SECONDS = 0.1
"""While requests wait or arrive."""
QUIET_PERIOD_SECONDS = 1.0
"""While none does: where a step takes long, looking would take as much time as the step."""


class QueueWatch:
    """Looks at the queue now and then, beside the engine's steps."""

    def __init__(
        self,
        engine: EngineCore,
        sessions: Sessions,
        counts: StepCounts,
        *,
        max_num_waiting: int,
        max_queue_seconds: float,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._counts = counts
        self._max_num_waiting = max_num_waiting
        self._max_queue_seconds = max_queue_seconds
        self._estimate = QueueEstimate(engine.scheduler.config.max_running)
        self._is_queue_announced = False
        self._arrived = asyncio.Event()
        self._load_announced = ReplicaLoad(0, 0)

    def state_at_arrival(self) -> QueueState:
        """The queue as it is now, when a request arrives."""
        self._arrived.set()
        return self._state()

    def _state(self) -> QueueState:
        return QueueState(
            num_waiting=self._engine.num_waiting,
            max_num_waiting=self._max_num_waiting,
            max_queue_seconds=self._max_queue_seconds,
            seconds_per_request=self._estimate.seconds_per_request,
            service_seconds=self._estimate.service_seconds,
        )

    def _load(self) -> ReplicaLoad:
        """What there is to do now, and how long it takes."""
        requests = self._engine.unfinished
        costs = self._counts.step_costs
        return ReplicaLoad(
            num_requests=len(requests),
            num_uncomputed_tokens=sum(
                max(0, request.num_prompt_tokens - request.num_computed_tokens)
                for request in requests
            ),
            seconds_per_prompt_token=costs.seconds_per_prompt_token,
            seconds_per_decode=costs.seconds_per_decode,
        )

    async def run(self) -> None:
        """Looks until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._engine.num_waiting:
                self._arrived.clear()
                timer = loop.call_later(QUIET_PERIOD_SECONDS - PERIOD_SECONDS, self._arrived.set)
                await self._arrived.wait()
                timer.cancel()
            await asyncio.sleep(PERIOD_SECONDS)
            self._look()

    def _look(self) -> None:
        """Takes a sample, ends the requests whose time to be scheduled has passed, and sends the
        queue's state to the gateways while requests wait, and the load if it changed.
        """
        now = time.monotonic()
        if self._engine.state is EngineState.RUNNING:
            self._sample(now)
        else:
            self._estimate.stand_still()
        if self._engine.num_waiting:
            self._engine.abort_late(now)
        num_waiting = self._engine.num_waiting
        if num_waiting or self._is_queue_announced:
            self._is_queue_announced = num_waiting > 0
            self._sessions.announce_queue(self._state())
        load = self._load()
        if load != self._load_announced:
            self._load_announced = load
            self._sessions.announce_load(load)

    def _sample(self, now: float) -> None:
        running = self._engine.scheduler.running
        expected = 0.0
        if self._estimate.counts_tokens and running:
            expected = sum(
                expected_tokens(
                    request.num_prompt_tokens, request.num_output_tokens, request.max_num_tokens
                )
                - (request.num_cached_tokens or 0)
                for request in running
            ) / len(running)
        self._estimate.sample(
            now,
            num_running=len(running),
            num_waiting=self._engine.num_waiting,
            num_completed=self._sessions.num_completed,
            num_tokens=self._counts.num_scheduled_tokens,
            tokens_per_request=max(1.0, expected),
        )
