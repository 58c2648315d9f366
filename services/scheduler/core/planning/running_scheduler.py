"""The first part of planning a step: running requests get tokens and blocks."""

from collections.abc import Awaitable, Collection, Mapping, Sequence

from services.common.pool.operations import Stop
from services.scheduler.core.computed_tokens import with_num_computed_tokens
from services.scheduler.core.output import Preemption
from services.scheduler.core.planning.chunks import aligned_chunk
from services.scheduler.core.planning.replica_state import ReplicaState
from services.scheduler.core.planning.step_builder import PlannedSteps, StepBuilder
from services.scheduler.core.planning.step_encoder import mismatch_error
from services.scheduler.core.planning.transfers import Transfers
from services.scheduler.core.planning.waiting_scheduler import WaitingScheduler
from services.scheduler.core.planning.window_clock import WindowClock
from services.scheduler.core.request import Request, RequestStatus


class RunningScheduler:
    """Divides a step's token budget among the running requests, and preempts requests if blocks are
    missing. A request on the fast path (see `RunningRequests`) gets one token without examination.
    """

    def __init__(self, state: ReplicaState, waiting_scheduler: WaitingScheduler) -> None:
        self._state = state
        self._running = state.running
        self._queues = state.queues
        self._kv_cache_manager = state.kv_cache_manager
        self._waiting_scheduler = waiting_scheduler
        self._config = config = state.config
        self._window_clock = None if config.only_grows else WindowClock(config)
        self._filled_block_size = config.hash_block_size if config.enable_prefix_caching else None
        self._has_drafts = config.num_speculative_tokens > 0
        self._may_drop_drafts = self._has_drafts and config.num_speculative_rows > 0
        self._feeds_forward = config.async_scheduling or config.pipeline_parallel_size == 1
        """Whether a step can be planned while the previous step still samples a request's token,
        because the workers themselves feed sampled tokens into the next step.
        """

    async def schedule(self, builder: StepBuilder, traceparent: str) -> None:
        """Divides the budget among the running requests and allocates their blocks. If blocks are
        missing, preempts a request, and resumes planning at the request that lacks blocks.
        """
        begin, num_decided = 0, None
        while True:
            growing = self._plan(builder, begin, num_decided)
            stop = await self._grow(builder, growing, traceparent)
            if stop is None:
                return
            request = growing[stop.item_index]
            if self._waits_for_blocks():
                await self._end(builder, request, traceparent)
                return
            begin, num_decided = self._make_room(builder, request)

    def update_after_schedule(self, builder: StepBuilder, steps: PlannedSteps) -> None:
        """Counts the tokens of a planned step as computed, so that the next step can be planned
        while this step runs. Puts requests on the fast path. `steps` are the earlier steps.
        """
        self._running.advance()
        if not builder.off_fast_path:
            return
        num_drafts = self._config.num_drafts(len(self._running)) if self._has_drafts else 0
        may_move = self._window_clock is not None or (self._may_drop_drafts and not num_drafts)
        moving = _moving(builder.off_fast_path, steps) if may_move else ()
        num_placeholders = num_drafts if self._config.async_scheduling else 0
        entering: dict[Request, int] = {}
        prefill_chunks: list[Request] = []
        for request, num_computed in builder.off_fast_path.items():
            request.origin = num_computed
            is_prefill_chunk = num_computed < len(request.token_ids)
            request.is_prefill_chunk = is_prefill_chunk
            if is_prefill_chunk:
                prefill_chunks.append(request)
            if self._has_drafts:
                # Placeholders for drafts that the workers will propose in the planned step.
                request.draft_token_ids = [] if is_prefill_chunk else [-1] * num_placeholders
            if num_drafts:
                continue
            if self._feeds_forward and not is_prefill_chunk and request not in moving:
                num_steps = self._fast_path_end(request) - num_computed
                if num_steps > 0:
                    entering[request] = num_steps
        if prefill_chunks:
            builder.plan.prefill_chunks = frozenset(prefill_chunks)
        if entering:
            self._running.enter_fast_path(entering)

    def preempt_all(self) -> list[Request]:
        """Preempts and returns all running requests. Queues them in their order of admission."""
        victims = list(reversed(self._running))
        for victim in victims:
            self._preempt(victim)
        return victims

    def preempt_waiting(self, builder: StepBuilder) -> None:
        """Preempts the last waiting request that holds blocks. Must only be called if no request
        runs and the first waiting request lacks blocks.

        This prevents a deadlock of two sessions (requests with several turns), if the next turn of
        each session needs blocks that the other session holds. If only the first waiting request
        holds blocks, and no session is between two turns, the first request itself is preempted.
        Otherwise a session with state-space layers that holds all blocks would wait forever.

        Sessions between two turns keep their blocks. Nothing is preempted while KV transfers, steps
        in flight or pending operations are about to free blocks.
        """
        state = self._state
        is_busy = state.transfers is not None and state.transfers.is_moving
        if is_busy or state.steps.in_flight or self._kv_cache_manager.pending:
            return
        if state.transfers is not None and self._promote(state.transfers):
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

    def _promote(self, transfers: Transfers) -> bool:
        """Makes waiting requests whose KV loads have ended ready for admission, so that they can be
        preempted. Returns whether this has freed the blocks of a request whose load failed.
        """
        queues = self._state.queues
        promoted = [request for request in queues.kv_waiting if transfers.promote(request)]
        failed = [request for request in promoted if not request.holds_blocks]
        for request in failed:
            queues.note_lost_blocks(request)
        return bool(failed)

    def _plan(
        self, builder: StepBuilder, begin: int = 0, num_decided: int | None = None
    ) -> list[Request]:
        """Schedules tokens of the running requests from index `begin` on, until the budget is used
        up. Returns the requests that may need more blocks for their tokens.

        Only requests off the fast path are examined. Consecutive requests that need one token each
        form a run, which is scheduled as a whole. An examined request is part of a run if it needs
        one token and no encoder items, and if the budget suffices for one token of each later
        request.

        After a preemption, `num_decided` is the number of tokens that were scheduled before for the
        request at `begin`. As in vLLM, the request gets no more than this number of tokens, and
        later requests can use the budget that the preempted request frees.
        """
        running = self._running
        growing: list[Request] = []
        if self._may_drop_drafts and self._config.num_drafts(len(running)):
            for request in running.between(0, len(running)):
                running.leave_fast_path(request)
        run_begin, is_enough = begin, builder.token_budget >= len(running) - begin
        for request, num_computed in with_num_computed_tokens(running.off_fast_path(begin)):
            aligns = self._config.aligns_states
            if num_decided is not None:
                num_new, num_decided, aligns = num_decided, None, False
            elif builder.defers_prefills and request.is_prefill_chunk:
                num_new = 0
            else:
                num_new = self._num_new_tokens(builder, request, num_computed)
            has_items = request.encoder_inputs and num_computed < request.num_encoded_tokens
            if num_new == 1 and is_enough and not has_items:
                builder.off_fast_path[request] = num_computed + 1
            else:
                index = running.index(request)
                self._schedule_run(builder, run_begin, index)
                run_begin = index + 1
                num_new = self._schedule_one(builder, request, num_computed, num_new, aligns=aligns)
                if num_new == 0:
                    continue
                is_enough = builder.token_budget >= len(running) - run_begin
            if self._kv_cache_manager.needs_slots(request, num_computed + num_new):
                growing.append(request)
        self._schedule_run(builder, run_begin, len(running))
        return growing

    def _schedule_run(self, builder: StepBuilder, begin: int, end: int) -> None:
        """Schedules one token of each running request from index `begin` up to, but not including,
        `end`. The last requests get no token if the budget is smaller.
        """
        if begin < end:
            last = min(end, begin + builder.token_budget)
            builder.schedule_one_token_each(self._running.between(begin, last))
            for request in self._running.between(last, end):
                self._running.leave_fast_path(request)

    def _schedule_one(
        self, builder: StepBuilder, request: Request, start: int, num_new: int, *, aligns: bool
    ) -> int:
        """Schedules up to `num_new` tokens of a request from position `start` on, within the step's
        token budget and the encoder's limits. If `aligns` is true, the chunk ends where a state of
        recurrent layers can be cached. Returns the number of scheduled tokens.
        """
        num_new = min(num_new, builder.token_budget)
        if aligns:
            num_new = aligned_chunk(self._config, request, start, num_new)
        if num_new > 0 and start < request.num_encoded_tokens:
            decision = builder.encoder.schedule(request, start, num_new)
            num_new = decision.num_tokens
            if decision.inputs and num_new:
                builder.plan.encoder_inputs[request] = decision.inputs
            if decision.mismatch:
                builder.failed[request] = mismatch_error(decision.mismatch)
        if num_new > 0:
            builder.schedule(request, num_new)
        return max(num_new, 0)

    def _num_new_tokens(self, builder: StepBuilder, request: Request, num_computed: int) -> int:
        """Number of tokens of a running request, drafts included, that the step may compute."""
        num_tokens = len(request.token_ids)
        num_new = num_tokens - num_computed
        if num_new <= 0:
            # All known tokens are computed. A step in flight samples the next, perhaps last, token.
            if not self._feeds_forward or num_tokens + 1 >= request.max_num_tokens:
                return 0
            num_new = 1
        if request.draft_token_ids:
            num_new += len(request.draft_token_ids)
        longest = self._config.max_prompt_len - num_computed
        return min(builder.cap(num_new), longest) if num_new > 1 or longest < 1 else 1

    def _fast_path_end(self, request: Request) -> int:
        """The number of computed tokens at which a decoding request must leave the fast path. It
        then needs a block, has filled a block, or is about to reach its maximum length. 0 if the
        request must not be on the fast path.
        """
        if request.sampling.repetition_detection is not None:
            return 0
        longest = request.max_num_tokens - 2
        if self._window_clock is None:
            end = request.num_slots - self._config.num_lookahead_tokens
        else:
            end = self._window_clock.next_change(request.num_computed_tokens)
        if self._filled_block_size is not None:
            filled = (request.num_committed_blocks + 1) * self._filled_block_size
            end = end if end < filled else filled
        return end if end < longest else longest

    def _grow(
        self, builder: StepBuilder, growing: Sequence[Request], traceparent: str
    ) -> Awaitable[Stop | None]:
        """Allocates blocks for `growing`, and looks up cached prefixes of waiting requests. After a
        preemption nothing is looked up, because the step then admits no request.
        """
        looked_up: list[Request] = []
        if not builder.plan.preemptions and self._queues.has_queued:
            waiting = self._waiting_scheduler
            looked_up = waiting.not_looked_up(builder, waiting.candidates(builder))
        leaving, steps = self._running.leaving_fast_path(), self._state.steps
        return self._kv_cache_manager.grow(builder, growing, leaving, looked_up, steps, traceparent)

    def _waits_for_blocks(self) -> bool:
        """Whether to wait for blocks that transfers or steps will free, instead of preempting."""
        transfers, in_flight = self._state.transfers, self._state.steps.in_flight
        if transfers is None:
            return False
        return transfers.defer_frees(self._state.policy.victim(self._running), in_flight)

    async def _end(self, builder: StepBuilder, request: Request, traceparent: str) -> None:
        builder.unschedule_from(request)
        for later in self._running.between(self._running.index(request), len(self._running)):
            self._running.leave_fast_path(later)
        await self._grow(builder, (), traceparent)

    def _make_room(self, builder: StepBuilder, request: Request) -> tuple[int, int | None]:
        """Preempts the request that the policy selects (the victim), because `request` lacks
        blocks. If only `request` runs and the policy keeps blocks of an ended request, frees these
        blocks instead. Returns the index of the running request at which planning resumes, and the
        number of tokens that were scheduled for `request`, or None if it is the victim.
        """
        num_decided = builder.unschedule_from(request)
        index = self._running.index(request)
        retention = self._state.retention
        if retention is not None and len(self._running) == 1 and retention.make_room():
            builder.encoder.keep(request)
            return index, num_decided
        victim = self._state.policy.victim(self._running)
        victim_index = self._running.index(victim)
        if victim in builder.plan.requests:
            num_stored = min(victim.num_computed_tokens, len(victim.token_ids))
            self._kv_cache_manager.publish(victim, num_stored)
        builder.unschedule(victim)
        builder.plan.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        if victim is request:
            return index, None
        builder.encoder.keep(request)
        return index - 1 if victim_index < index else index, num_decided

    def _preempt(self, request: Request) -> None:
        state, steps = self._state, self._state.steps
        state.take_out(request)
        # If a token in flight will be discarded, all later tokens in flight must be discarded too.
        if self._config.requires_kv_delivery or steps.drops(request):
            steps.drop([request])
        request.awaited_step = steps.last_awaited(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_discarded_tokens = request.num_computed_tokens
        state.num_preemptions += 1
        state.free(request)
        self._queues.waiting.prepend(request)


def _moving(scheduled: Mapping[Request, int], steps: PlannedSteps) -> Collection[Request]:
    """The requests that must not be on the fast path, because they have more than one token in this
    step or in the steps in flight. Their sliding windows may move by more than one token in a step,
    or drafts may be rejected. `scheduled` maps each request of the step to its number of computed
    tokens after the step.
    """
    num_in_flight = steps.num_tokens()
    return {
        request
        for request, end in scheduled.items()
        if end - request.num_computed_tokens != 1 or num_in_flight(request) > 1
    }
