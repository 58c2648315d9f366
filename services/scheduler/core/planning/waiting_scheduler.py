"""The second part of planning a step: the admission of waiting requests."""

from collections.abc import Iterable, Iterator, Sequence

from services.common.pool.operations import BlockTables, StopReason
from services.common.replica.pause_mode import PauseMode
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import WaitReason
from services.scheduler.core.planning import admission
from services.scheduler.core.planning.admission import AdmissionPlan, PassedOver
from services.scheduler.core.planning.replica_state import ReplicaState
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.request import Request, RequestStatus

LOOKUP_BATCH = 32
"""Limit on the number of waiting requests whose cached prefixes one transaction looks up."""
_LEAST_LOOKUP_BATCH = 4
"""The limit after a step in which blocks were missing. The next step then admits few requests or
none, and to look up the long prefixes of many would take most of the pool's time.
"""
_BLOCKS_LACK = {
    StopReason.NO_BLOCKS: WaitReason.NO_BLOCKS,
    StopReason.KEPT_FREE: WaitReason.HEADROOM,
}
_LACK_OF_BLOCKS = {*_BLOCKS_LACK.values(), WaitReason.RETAINED}


class WaitingScheduler:
    """Admits waiting requests to a step. The cached prefix of a prompt counts as computed."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._config = state.config
        self._queues = state.queues
        self._kv_cache_manager = state.kv_cache_manager
        self._planner = admission.AdmissionPlanner(state.config, state.retention)
        self._transfers = state.transfers
        self._lookup_batch = LOOKUP_BATCH
        """The present limit on the number of requests that one transaction looks up."""

    async def schedule(self, builder: StepBuilder, traceparent: str) -> WaitReason | None:
        """Admits requests from the head of the queue. Returns why the remaining requests wait."""
        if not self._queues.has_queued:
            return WaitReason.HELD_BACK if self._queues.held_back else None
        reason = await self._admit_candidates(builder, traceparent)
        if self._transfers is not None:
            self._queues.requeue_without_blocks()
            await self._kv_cache_manager.flush()
        return reason

    async def _admit_candidates(self, builder: StepBuilder, traceparent: str) -> WaitReason | None:
        for candidates in self._batches(builder):
            planned = None
            if self._transfers is not None:
                (request,) = candidates
                planned = await self._transfers.plan(builder, request, traceparent)
            elif unknown := self.not_looked_up(builder, candidates):
                await self._kv_cache_manager.look_up(builder, unknown, traceparent)
            planned = planned or self._planner.plan(
                builder,
                candidates,
                num_running=len(self._state.running),
                num_free_slots=self._state.num_free_slots,
                num_free_blocks=self._kv_cache_manager.num_free_blocks,
            )
            reason = await self._carry_out(builder, planned, traceparent)
            if reason in _LACK_OF_BLOCKS:
                self._lookup_batch = _LEAST_LOOKUP_BATCH
            if reason is not None:
                return reason
            self._lookup_batch = min(2 * self._lookup_batch, LOOKUP_BATCH)
        return self._why_others_wait(builder)

    def _batches(self, builder: StepBuilder) -> Iterator[list[Request]]:
        """Yields lists of waiting requests whose admissions are planned together. With a KV
        connector, each list contains one request, because each admission may change how many tokens
        the connector can load for the next request.
        """
        if self._transfers is None:
            while candidates := self.candidates(builder):
                yield candidates
            return
        for request in list(self._looked_at):
            if not (builder.token_budget and self._state.num_free_slots):
                return
            yield [request]

    async def _carry_out(
        self, builder: StepBuilder, planned: AdmissionPlan, traceparent: str
    ) -> WaitReason | None:
        """Executes planned admissions with the pool. Returns why admission must stop, or None."""
        if not planned.admissions:
            self._decide(builder, planned, ())
            self._refuse(builder, planned.refused)
            return planned.wait_reason
        terms = [one.terms for one in planned.admissions]
        outcome = await self._kv_cache_manager.admit(terms, traceparent)
        admitted, stop = outcome.admitted, outcome.stop
        self._decide(builder, planned, admitted)
        if stop is None:
            if planned.has_old_hits or self._transfers is not None:
                builder.prefixes.forget_hits()
            return None
        stopped = planned.admissions[len(admitted)]
        if stop.reason in _BLOCKS_LACK:
            self._refuse(builder, stopped)
            return _BLOCKS_LACK[stop.reason]
        if stop.reason is StopReason.RETAINED:
            assert self._state.retention is not None
            num_running = len(self._state.running)
            builder.plan.retained = self._state.retention.held_up(num_running)
            return WaitReason.RETAINED
        hit = stop.num_hit_tokens, stop.shared_prefix_boundary
        builder.prefixes.note_hit(stopped.request, *hit)
        return None

    def _why_others_wait(self, builder: StepBuilder) -> WaitReason | None:
        """Why requests still wait although the step can examine no further request."""
        first = next(self._queues.queued, None)
        if first is None:
            return WaitReason.HELD_BACK if self._queues.held_back else None
        if self._state.pause_mode is PauseMode.WAIT:
            return WaitReason.PAUSED
        if builder.token_budget == 0:
            return WaitReason.BUDGET
        if not self._state.num_free_slots:
            return WaitReason.MAX_SEQS
        return builder.plan.passed_over.get(first)

    @property
    def _looked_at(self) -> Iterable[Request]:
        """Requests that may be admitted. During a pause, only requests that hold blocks."""
        return self._queues.queued if self._state.pause_mode is None else self._queues.kv_waiting

    def candidates(self, builder: StepBuilder) -> list[Request]:
        """The first requests of the queue, as many as the free rows of the batch, the token budget
        and the limit on lookups allow. Requests that this step has already skipped are left out.
        Requests that it will skip are included, so that the plan records the reason, but do not
        count toward the limits.
        """
        candidates: list[Request] = []
        num_ready = min(self._state.num_free_slots, builder.token_budget, self._lookup_batch)
        passed_over, passing_over = builder.plan.passed_over, builder.passing_over
        for request in self._looked_at:
            if num_ready <= 0:
                break
            if request not in passed_over:
                candidates.append(request)
                num_ready -= passing_over.reason(request) is None
        return candidates

    def not_looked_up(self, builder: StepBuilder, candidates: Sequence[Request]) -> list[Request]:
        """The candidates whose cached prefix must be looked up. A candidate that holds blocks needs
        no lookup: its computed tokens become its prefix hit.
        """
        not_looked_up: list[Request] = []
        for request in candidates:
            if request in builder.prefixes.hits or builder.passing_over.reason(request) is not None:
                continue
            if request.holds_blocks:
                self._kv_cache_manager.resume_prefix(builder, request, self._state.steps)
            else:
                not_looked_up.append(request)
        return not_looked_up

    def _decide(
        self, builder: StepBuilder, planned: AdmissionPlan, admitted: Sequence[BlockTables]
    ) -> None:
        """Applies the decisions before the first admission that got no blocks. `admitted` contains
        the block tables of the admissions that succeeded, in order.
        """
        tables = iter(admitted)
        for decision in planned.decisions:
            if isinstance(decision, PassedOver):
                self._pass_over(builder, decision)
            elif (blocks := next(tables, None)) is not None:
                self._admit(builder, decision, blocks)
            else:
                return

    def _pass_over(self, builder: StepBuilder, passed: PassedOver) -> None:
        request, reason = passed.request, passed.reason
        builder.plan.passed_over[request] = reason
        self._queues.pass_over(request, reason)
        if passed.num_asked:
            builder.encoder.decide(request, passed.num_computed_tokens, passed.num_asked)
        if request.grammar is GrammarStatus.FAILED:  # even if `error` is empty
            builder.failed[request] = request.error
        elif passed.error:
            builder.failed[request] = passed.error

    def _refuse(self, builder: StepBuilder, refused: admission.PlannedAdmission | None) -> None:
        """Evicts the encoder outputs that the admission of a request would have evicted, although
        the request lacks blocks. vLLM evicts outputs before it allocates blocks, too.
        """
        if refused is not None:
            start = refused.terms.num_computed_tokens
            builder.encoder.refuse(refused.request, start, refused.num_asked)

    def _admit(
        self, builder: StepBuilder, planned: admission.PlannedAdmission, blocks: BlockTables
    ) -> None:
        request, terms, state = planned.request, planned.terms, self._state
        if state.retention is not None:
            state.retention.admitted(request, self._queues.waiting)
        self._queues.remove(request)
        state.running.append(request)
        state.rows.take(request)
        builder.passing_over.admit(request)
        size = self._config.hash_block_size
        request.status = RequestStatus.RUNNING
        request.take_blocks(terms, blocks, self._config.block_size, size)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = terms.num_computed_tokens
        if state.transfers is not None:
            num_external = terms.num_external_tokens
            state.transfers.admitted(request, blocks, planned.num_new_tokens, num_external)
        request.draft_token_ids = [-1] * planned.num_drafts
        start = terms.num_computed_tokens
        if start < request.num_encoded_tokens:
            inputs = builder.encoder.admit(request, start, planned.num_asked)
            builder.plan.encoder_inputs |= {request: inputs} if inputs else {}
        builder.schedule(request, planned.num_tokens)
        builder.plan.block_tables[request] = blocks
        if self._config.foretells_hits:
            begin, end = terms.num_hit_tokens // size, request.num_committed_blocks
            builder.prefixes.published.update(request.block_hashes[begin:end])
        (builder.plan.resumed if terms.resumed else builder.plan.new).append(request)
