"""The scheduler: what each engine step computes, of which requests."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from services.common.finish_reason import FinishReason
from services.common.pause_mode import PauseMode
from services.common.pool_operations import BlockTables, StopReason
from services.scheduler.core.admission import AdmissionPlanner, PlannedAdmission
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.passing_over import PassingOver
from services.scheduler.core.policies import find_policy
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.running_planner import RunningPlanner
from services.scheduler.core.running_requests import RunningRequests
from services.scheduler.core.step_builder import StepBuilder

LOOKUP_BATCH = 32
"""Waiting requests whose prefix is looked up in one transaction."""


class Scheduler:
    """Requests of one replica: those that run, those that wait, and the plan of each step.

    Decisions are those of vLLM V1's scheduler; what differs is that memory is a transaction away.
    Not safe for concurrent calls: one engine loop drives it.
    """

    def __init__(self, config: SchedulerConfig, pool: KVPool) -> None:
        self.config = config
        self._policy = find_policy(config.policy)
        self.waiting = self._policy.create_request_queue()
        self.held_back: dict[Request, None] = {}
        """Requests that must not be admitted now, in the order in which they were held back."""
        self.admitted_only: Collection[Request] | None = None
        """The only requests that may be admitted; None if all may."""
        self.passed_over: dict[Request, WaitReason] = {}
        """Waiting requests that were passed over since they began to wait, and why the last time.
        """
        self.running = RunningRequests()
        self.num_preemptions = 0
        self.pause_mode: PauseMode | None = None
        self._kv_cache_manager = KVCacheManager(config, pool)
        self._running_planner = RunningPlanner(config, self.running, self._kv_cache_manager)
        self._admission_planner = AdmissionPlanner(config)
        self._caches_states = config.caches_states
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        """Rows of the workers' batch; the one that was freed last is taken first."""
        self._removed_rows: list[int] = []
        """Rows that were freed and that the workers are to empty with the next step."""
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, if only send operations to pool or workers."""
        has_operations = self._kv_cache_manager.has_operations or self._removed_rows
        return bool(self.running or self.waiting or has_operations)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, those that are held back included."""
        return len(self.waiting) + len(self.held_back)

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *self.waiting, *self.held_back]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request held after the last transaction."""
        return self._kv_cache_manager.num_free_blocks

    @property
    def next_candidates(self) -> Iterable[Request]:
        """Waiting requests whose admission the next step may try."""
        num_rows = self.config.max_running - len(self.running)
        ready = (request for request in self.waiting if request not in self.passed_over)
        return islice(ready, max(0, min(num_rows, LOOKUP_BATCH)))

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""
        request.max_num_tokens = self.config.max_model_len
        if self.config.pooling:
            request.max_num_tokens = request.num_prompt_tokens
        elif request.sampling.max_tokens is not None:
            longest = request.num_prompt_tokens + request.sampling.max_tokens
            request.max_num_tokens = min(longest, request.max_num_tokens)
        if self.admitted_only is None:
            self.waiting.add(request)
        else:
            self.held_back[request] = None

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, whether it runs or waits. Does nothing if it has ended."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.held_back:
            del self.held_back[request]
        else:
            self._remove_waiting(request)
        request.finish(reason)
        self._free(request)

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Holds back all requests but these, also those that arrive later; None lets all be
        admitted again. No request may run. They are queued in the order in which they arrived.
        """
        if self.running:
            raise AssertionError("requests run that are to be held back")
        queued = sorted([*self.waiting, *self.held_back], key=lambda request: request.key)
        self.admitted_only = requests
        self.waiting = self._policy.create_request_queue()
        self.held_back.clear()
        self.passed_over.clear()
        for request in queued:
            if requests is None or request in requests:
                self.waiting.add(request)
            else:
                self.held_back[request] = None

    def pause(self, mode: PauseMode) -> None:
        """Notes that the caller plans no step until `resume`. With ABORT it ends all requests; with
        WAIT it plans steps, which admit no request, while requests run.
        """
        self.pause_mode = mode

    def resume(self) -> None:
        """Notes that steps are planned again."""
        self.pause_mode = None

    async def schedule(self, traceparent: str = "") -> SchedulerOutput:
        """Plans one step and reserves its memory.

        There is no prefill and no decode. Each request has tokens, and a count of those that are
        computed; a step hands out a budget of tokens so that the count catches up:

        1. Running requests, in the order of admission. The blocks that they need are allocated in
           one transaction with the pool. If they do not fit, the policy chooses a running request
           to preempt, and the rest is planned again.
        2. Then, if none was preempted, waiting requests from the head of the queue, each with
           the cached part of its prompt, until budget, rows or blocks are used up. If the head
           cannot be admitted, those behind it are not either, unless the reason is its own: then
           it is passed over, and keeps its place.
        """
        builder = self._new_builder()
        await self._schedule_running(builder, traceparent)
        wait_reason: WaitReason | None = WaitReason.NO_BLOCKS
        if not builder.plan.preemptions:
            wait_reason = await self._schedule_waiting(builder, traceparent)
        return self._finish_step(builder, wait_reason)

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Appends the sampled tokens of a step, also to requests that were preempted while it ran,
        and ends requests that are done, as those are whose prompt was pooled. Requests that ended
        while it ran are passed over.
        """
        for index in output.nan_requests:
            self.running.leave_fast_path(plan.requests[index])
        taken: list[Sequence[int] | None] = list(output.token_ids)
        ended: list[Request] = []
        indexes = range(len(plan.requests))
        for index, request, tokens in zip(indexes, plan.requests, output.token_ids, strict=True):
            if request.is_on_fast_path and tokens and tokens[0] not in request.ending_token_ids:
                request.token_ids.append(tokens[0])
            elif request.finish_reason is not None:
                taken[index] = None
            elif index in output.nan_requests:
                request.finish(FinishReason.NAN_IN_LOGITS)
                taken[index] = ()
                ended.append(request)
            elif tokens:
                taken[index] = self._update_request_with_output(plan, output, index)
                if request.finish_reason is not None:
                    ended.append(request)
            elif index in output.pooled:
                request.finish(FinishReason.STOP)
                ended.append(request)
        self._remove(ended)
        return EngineCoreOutputs(
            plan, taken, output.logprobs, ended, output.execute_nanos, output.pooled
        )

    def preempt_all(self) -> list[Request]:
        """Preempts every running request, in an order that keeps theirs in the queue."""
        return self._preempt_running()

    def forget_pool(self) -> list[Request]:
        """Starts over with an empty pool and empty workers. Returns the requests that ran."""
        victims = self._preempt_running()
        for request in self.waiting:
            request.forget_blocks()
        self._kv_cache_manager.forget()
        self._removed_rows = []
        return victims

    async def flush(self) -> None:
        """Sends the pool now the operations that would otherwise go with the next step."""
        await self._kv_cache_manager.flush()

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and changes nothing, if blocks are in use."""
        return await self._kv_cache_manager.reset_prefix_cache()

    # Step 1: running requests

    async def _schedule_running(self, builder: StepBuilder, traceparent: str) -> None:
        begin, num_decided = 0, None
        while True:
            growing = self._running_planner.plan(builder, begin, num_decided)
            looked_up = list[Request]()
            if not builder.plan.preemptions:
                looked_up = self._not_looked_up(builder, self._candidates(builder))
            leaving = self.running.leaving_fast_path()
            outcome = await self._kv_cache_manager.grow(
                builder, growing, leaving, looked_up, traceparent
            )
            if outcome.stop is None:
                return
            begin, num_decided = self._make_room(builder, growing[outcome.stop.item_index])

    def _make_room(self, builder: StepBuilder, request: Request) -> tuple[int, int | None]:
        """Preempts a request because `request` lacks blocks. Returns the index in the order of
        admission from which to plan again, and the tokens that `request` was scheduled, unless it
        is the victim itself.
        """
        num_decided = builder.unschedule_from(request)
        victim = self._policy.victim(self.running)
        index, victim_index = self.running.index(request), self.running.index(victim)
        builder.unschedule(victim)
        builder.plan.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        if victim is request:
            return index, None
        return index - 1 if victim_index < index else index, num_decided

    def _preempt_running(self) -> list[Request]:
        victims = list(reversed(self.running))
        for victim in victims:
            self._preempt(victim)
        return victims

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._free(request)
        self.waiting.prepend(request)

    # Step 2: waiting requests

    async def _schedule_waiting(self, builder: StepBuilder, traceparent: str) -> WaitReason | None:
        """Admits from the head of the queue; returns why it stopped before the queue was empty."""
        while candidates := self._candidates(builder):
            if unknown := self._not_looked_up(builder, candidates):
                await self._kv_cache_manager.look_up(builder, unknown, traceparent)
            planned = self._admission_planner.plan(
                builder,
                candidates,
                num_running=len(self.running),
                num_free_blocks=self.num_free_blocks,
            )
            terms = [admission.terms for admission in planned.admissions]
            outcome = await self._kv_cache_manager.admit(terms, traceparent)
            for admission, blocks in zip(planned.admissions, outcome.admitted, strict=False):
                self._admit(builder, admission, blocks)
            for passed in planned.passed_over:
                if passed.num_admissions <= len(outcome.admitted):
                    self._pass_over(builder, passed.request, passed.reason)
            if outcome.stop is not None:
                if outcome.stop.reason is StopReason.NO_BLOCKS:
                    return WaitReason.NO_BLOCKS
                changed = planned.admissions[len(outcome.admitted)].request
                builder.hits[changed] = outcome.stop.num_hit_tokens
            elif planned.wait_reason is not None and not planned.admissions:
                return planned.wait_reason
        return self._why_others_wait(builder)

    def _why_others_wait(self, builder: StepBuilder) -> WaitReason | None:
        """Why those wait that were no candidates for admission."""
        if not self.waiting:
            return WaitReason.HELD_BACK if self.held_back else None
        if self.pause_mode is PauseMode.WAIT:
            return WaitReason.PAUSED
        if builder.token_budget == 0:
            return WaitReason.BUDGET
        if len(self.running) >= self.config.max_running:
            return WaitReason.MAX_SEQS
        return builder.plan.passed_over[next(iter(self.waiting))]

    def _candidates(self, builder: StepBuilder) -> list[Request]:
        """The head of the queue, as far as rows and budget could reach, without those that were
        passed over in this step. Those that will be take no row.
        """
        if not self.waiting or self.pause_mode is PauseMode.WAIT:
            return []
        num_rows = self.config.max_running - len(self.running)
        num_ready = min(num_rows, builder.token_budget, LOOKUP_BATCH)
        passed_over, candidates = builder.plan.passed_over, list[Request]()
        for request in self.waiting:
            if num_ready <= 0:
                break
            if request not in passed_over:
                candidates.append(request)
                num_ready -= builder.passing_over.reason(request) is None
        return candidates

    def _not_looked_up(self, builder: StepBuilder, candidates: Sequence[Request]) -> list[Request]:
        """The candidates whose prefix must be looked up: those that may be admitted."""
        return [
            request
            for request in candidates
            if request not in builder.hits and builder.passing_over.reason(request) is None
        ]

    def _pass_over(self, builder: StepBuilder, request: Request, reason: WaitReason) -> None:
        builder.plan.passed_over[request] = self.passed_over[request] = reason

    def _remove_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self.passed_over.pop(request, None)

    def _admit(
        self, builder: StepBuilder, admission: PlannedAdmission, blocks: BlockTables
    ) -> None:
        request, terms = admission.request, admission.terms
        self._remove_waiting(request)
        self.running.append(request)
        builder.passing_over.admit(request)
        size = self.config.block_size
        hit, num_committed_blocks = terms.num_hit_tokens, terms.num_commit_tokens // size
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.num_computed_tokens = hit
        request.num_slots = len(blocks[0]) * size
        request.num_committed_blocks = num_committed_blocks
        request.known_to_pool = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit
        request.draft_token_ids = [-1] * admission.num_drafts
        builder.schedule(request, admission.num_new_tokens + admission.num_drafts)
        builder.plan.block_tables[request] = blocks
        if not self._caches_states:
            builder.published.update(request.block_hashes[hit // size : num_committed_blocks])
        (builder.plan.resumed if terms.resumed else builder.plan.new).append(request)

    # Both steps

    def _new_builder(self) -> StepBuilder:
        config, num_requests = self.config, len(self.running) + len(self.waiting)
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive and num_requests:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
        if threshold and self._caches_states:
            threshold = max(threshold, config.block_size)
        if num_requests <= 1:
            threshold = 0
        passing_over = PassingOver(config.max_loras, self.running if self.waiting else ())
        plan = SchedulerOutput(self._num_steps)
        return StepBuilder(plan, config.token_budget, threshold, passing_over)

    def _finish_step(self, builder: StepBuilder, wait_reason: WaitReason | None) -> SchedulerOutput:
        """The planned step; from here on its tokens count as computed."""
        plan = builder.plan
        plan.wait_reason = wait_reason
        plan.removed_rows, self._removed_rows = self._removed_rows, []
        plan.block_ids_to_zero = self._kv_cache_manager.pop_block_ids_to_zero()
        self._num_steps += 1
        self._running_planner.update_after_schedule(builder)
        return plan

    # After a step

    def _update_request_with_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, index: int
    ) -> Sequence[int]:
        """Appends the tokens of a request; returns those up to its end, if it ended."""
        request = plan.requests[index]
        kept = request.append_output_token_ids(output.token_ids[index])
        drafts = plan.draft_token_ids.get(request)
        if drafts and request.num_computed_tokens:
            # Drafts that were rejected, or came after the end, were never computed.
            request.num_computed_tokens -= len(drafts) + 1 - len(kept)
        if output.draft_token_ids and not self.config.async_scheduling:
            request.draft_token_ids = list(output.draft_token_ids[index])
        if request.row is not None:
            self._kv_cache_manager.publish_known(request)
        return kept

    def _remove(self, ended: list[Request]) -> None:
        """Takes out requests that have ended. A request may end in the queue: by a token that was
        in flight when it was preempted.
        """
        for request in ended:
            if request.row is None:
                self._remove_waiting(request)
            else:
                self.running.remove(request)
            self._free(request)

    def _free(self, request: Request) -> None:
        """Frees the row of a request and, with the next transaction, its blocks."""
        self._kv_cache_manager.release(request)
        if request.row is not None:
            self._free_rows.append(request.row)
            self._removed_rows.append(request.row)
        request.forget_blocks()
