"""Estimates the waits in the queue, reports them to gateways, and ends overdue requests."""

import asyncio
import time
from math import fsum

from services.common.replica.queue_state import QueueState
from services.scheduler.adapters.gateways.resumable_sessions import ResumableSessions
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.core.engine.engine_core import EngineCore, EngineState
from services.scheduler.core.engine.queue_estimate import MARGIN, QueueEstimate, expected_tokens
from services.scheduler.core.output import WaitReason

PERIOD_SECONDS = 0.1
"""Time between two samples while requests wait or arrive, in seconds."""
QUIET_PERIOD_SECONDS = 1.0
"""Seconds between two samples while no request waits or arrives, to save CPU time."""

_MISSING = (WaitReason.BUDGET, WaitReason.NO_BLOCKS)
"""Wait reasons of a replica that is full although fewer than `max_num_seqs` requests run."""


class QueueWatch:
    """Samples the queue periodically, independently of the engine's steps."""

    def __init__(
        self,
        engine: EngineCore,
        sessions: Sessions,
        counts: StepCounts,
        *,
        max_num_waiting: int,
        max_queue_seconds: float,
        client_sessions: ResumableSessions,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._counts = counts
        self._max_num_waiting = max_num_waiting
        self._max_queue_seconds = max_queue_seconds
        self._client_sessions = client_sessions
        self._estimate = QueueEstimate(engine.scheduler.config.max_running)
        self._seconds_per_prompt = 0.0
        self._arrived = asyncio.Event()

    def state_at_arrival(self) -> QueueState:
        """The present queue state. Must be called when a request arrives."""
        self._arrived.set()
        return self._state()

    @property
    def _num_waiting(self) -> int:
        """Number of waiting requests, without clients' sessions (requests with several turns) that
        wait for input.
        """
        return self._engine.num_waiting - self._client_sessions.num_between_turns

    def _state(self) -> QueueState:
        num_waiting, estimate = self._num_waiting, self._estimate
        return QueueState(
            num_waiting,
            self._max_num_waiting,
            self._max_queue_seconds,
            estimate.seconds_per_request,
            estimate.service_seconds,
            num_running=len(self._engine.scheduler.running),
            is_blocked=num_waiting > 0 and self._counts.wait_reasons.current in _MISSING,
            num_free=self._num_free(num_waiting),
            seconds_per_prompt=self._seconds_per_prompt,
        )

    def _num_free(self, num_waiting: int) -> int:
        """Number of further requests that could run, if each needed as many blocks as the mean of
        running requests and of clients' sessions between two turns.
        """
        if num_waiting and self._counts.wait_reasons.current is WaitReason.NO_BLOCKS:
            return 0
        scheduler = self._engine.scheduler
        num_held = len(scheduler.running) + self._client_sessions.num_between_turns
        config, num_free_blocks = scheduler.config, scheduler.kv_cache_manager.num_free_blocks
        num_free = config.max_running - num_held
        num_used_blocks = config.num_blocks - 1 - num_free_blocks
        if num_held and num_used_blocks:
            num_free = min(num_free, num_free_blocks * num_held // num_used_blocks)
        return max(0, num_free)

    @property
    def estimated_wait_seconds(self) -> float:
        """Expected wait, in seconds, of a request that arrives now."""
        state = self._state()
        return state.expected_wait(state.num_waiting)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._num_waiting:
                self._arrived.clear()
                timer = loop.call_later(QUIET_PERIOD_SECONDS - PERIOD_SECONDS, self._arrived.set)
                await self._arrived.wait()
                timer.cancel()
            await asyncio.sleep(PERIOD_SECONDS)
            self._look()

    def _look(self) -> None:
        """Takes a sample, ends requests that have waited too long, and reports to the gateways."""
        now = time.monotonic()
        if self._engine.state is EngineState.RUNNING:
            self._sample(now)
        else:
            self._estimate.stand_still()
        if self._num_waiting:
            self._engine.abort_late(now)
            self._client_sessions.end_for_waiting(self._counts.wait_reasons.current, now)
        costs, scheduler = self._counts.step_costs, self._engine.scheduler
        self._seconds_per_prompt = MARGIN * costs.seconds_of_prompt(
            self._counts.mean_uncached_tokens, len(scheduler.running), scheduler.config.token_budget
        )
        self._sessions.report(
            self._state(), costs.seconds_per_prompt_token, costs.seconds_per_decode
        )

    def _sample(self, now: float) -> None:
        running = self._engine.scheduler.running
        most = self._engine.scheduler.config.max_running
        expected = 0.0
        if self._estimate.counts_tokens and running:
            expected = fsum(
                expected_tokens(
                    request.num_prompt_tokens, request.num_output_tokens, request.max_num_tokens
                )
                - (request.num_cached_tokens or 0)
                for request in running
            ) / len(running)
        self._estimate.sample(
            now,
            num_running=len(running),
            num_waiting=self._num_waiting,
            num_completed=self._sessions.num_completed,
            slowdown=self._counts.step_costs.slowdown(len(running), most),
            num_tokens=self._counts.num_scheduled_tokens,
            tokens_per_request=max(1.0, expected),
        )
