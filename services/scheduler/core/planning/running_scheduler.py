"""The first part of scheduling a step: allocates blocks for running requests, and preempts requests
if blocks are missing.
"""

from collections.abc import Awaitable, Sequence

from services.common.pool.operations import Stop
from services.scheduler.core.engine.replica_state import ReplicaState
from services.scheduler.core.output import Preemption
from services.scheduler.core.planning.running_planner import RunningPlanner
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.planning.waiting_scheduler import WaitingScheduler
from services.scheduler.core.request import Request, RequestStatus


class RunningScheduler:
    """Schedules the running requests of a step, and preempts requests if blocks are missing."""

    def __init__(self, state: ReplicaState, waiting_scheduler: WaitingScheduler) -> None:
        self.num_preemptions = 0
        self._state = state
        self._running = state.running
        self._queues = state.queues
        self._kv_cache_manager = state.kv_cache_manager
        self._waiting_scheduler = waiting_scheduler
        self.planner = RunningPlanner(state.config, state.running, state.kv_cache_manager)

    async def schedule(self, builder: StepBuilder, traceparent: str) -> None:
        """Divides the budget among the running requests and allocates their blocks.

        If the blocks of a request do not fit, a victim is preempted, and planning resumes at the
        request that lacks blocks. The transaction that allocates blocks also looks up the cached
        prefixes of requests that may be admitted next.
        """
        begin, num_decided = 0, None
        while True:
            growing = self.planner.plan(builder, begin, num_decided)
            stop = await self._grow(builder, growing, traceparent)
            if stop is None:
                return
            request = growing[stop.item_index]
            if self._waits_for_blocks():
                await self._end(builder, request, traceparent)
                return
            begin, num_decided = self._make_room(builder, request)

    def preempt_all(self) -> list[Request]:
        """Preempts every running request. The requests are queued in their order of admission."""
        victims = list(reversed(self._running))
        for victim in victims:
            self._preempt(victim)
        return victims

    def preempt_waiting(self, builder: StepBuilder) -> None:
        """Preempts the last of the waiting requests that hold blocks. Must only be called if no
        request runs and the first waiting request lacks blocks.

        Without this, two sessions could deadlock if the next turn of each needs blocks that the
        other holds. A session that holds all blocks could wait for itself, because with state-space
        layers it frees no block before its next turn is admitted. So the first request itself is
        preempted if it is the only one with blocks and no session is between two turns.

        Sessions between two turns keep their blocks. Nothing is preempted while transfers, steps
        in flight or pending operations are about to free blocks.
        """
        state = self._state
        is_busy = state.transfers is not None and state.transfers.is_moving
        if is_busy or state.steps.in_flight or self._kv_cache_manager.pending:
            return
        passed_over = builder.plan.passed_over
        first, *others = (
            one for one in state.queues.queued if not (one.is_blocked or one in passed_over)
        )
        victims = [one for one in others if one.holds_blocks]
        if first.holds_blocks and not (victims or state.queues.between_turns):
            victims = [first]
        if victims:
            victim = victims[-1]
            lost = Preemption(victim, first, victim.num_computed_tokens)
            builder.plan.preemptions.append(lost)
            self._preempt(victim)

    def _grow(
        self, builder: StepBuilder, growing: Sequence[Request], traceparent: str
    ) -> Awaitable[Stop | None]:
        """Allocates blocks for `growing`, and looks up prefixes of waiting requests. After a
        preemption nothing is looked up, because the step then admits no request.
        """
        looked_up: list[Request] = []
        if not builder.plan.preemptions and self._queues.has_queued:
            looked_up = self._waiting_scheduler.not_looked_up(builder)
        leaving, steps = self._running.leaving_fast_path(), self._state.steps
        return self._kv_cache_manager.grow(builder, growing, leaving, looked_up, steps, traceparent)

    def _waits_for_blocks(self) -> bool:
        """Whether a request that lacks blocks must wait for blocks that transfers or steps in
        flight are about to free. Preempting another request would free nothing now.
        """
        transfers = self._state.transfers
        if transfers is None:
            return False
        victim = self._state.policy.victim(self._running)
        return transfers.connector.has_pending_block_frees() or transfers.is_written(
            victim, self._state.steps.in_flight
        )

    async def _end(self, builder: StepBuilder, request: Request, traceparent: str) -> None:
        """Ends the plan before a request. No tokens are scheduled for it and for the requests
        admitted after it.
        """
        builder.unschedule_from(request)
        builder.encoder.take_back_from(request)
        for later in self._running.between(self._running.index(request), len(self._running)):
            self._running.leave_fast_path(later)
        await self._grow(builder, (), traceparent)

    def _make_room(self, builder: StepBuilder, request: Request) -> tuple[int, int | None]:
        """Preempts the policy's victim because `request` lacks blocks.

        Returns the index in the order of admission from which to plan again, and the number of
        tokens that `request` was scheduled. The number is None if `request` is the victim.
        """
        num_decided = builder.unschedule_from(request)
        builder.encoder.take_back_from(request)
        victim = self._state.policy.victim(self._running)
        index, victim_index = self._running.index(request), self._running.index(victim)
        if victim in builder.plan.requests:
            self._kv_cache_manager.publish_computed(victim)
        builder.unschedule(victim)
        builder.plan.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        if victim is request:
            return index, None
        builder.encoder.keep(request)
        return index - 1 if victim_index < index else index, num_decided

    def _preempt(self, request: Request) -> None:
        self._state.take_out(request)
        steps = self._state.steps
        # If a token in flight is dropped, all later tokens in flight are dropped with it.
        if self._state.config.requires_kv_delivery or steps.drops(request):
            steps.drop([request])
        request.awaited_step = steps.last_awaited(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._state.free(request)
        self._queues.prepend(request)
