"""The scheduler: what each engine step computes, of which requests."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from services.common.finish_reason import FinishReason
from services.common.pause_mode import PauseMode
from services.common.pool_operations import BlockTables, StopReason
from services.scheduler.core.admission import (
    AdmissionPlan,
    AdmissionPlanner,
    PassedOver,
    PlannedAdmission,
)
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.connector_admission import ConnectorAdmission
from services.scheduler.core.encoder_cache_manager import EncoderCacheManager
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.kv_connector import KVConnector
from services.scheduler.core.kv_role import KVLoadFailurePolicy
from services.scheduler.core.kv_transfers import KVTransfers
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.passing_over import PassingOver
from services.scheduler.core.policies import find_policy
from services.scheduler.core.policies.policy import RequestQueue
from services.scheduler.core.ports import KVPool
from services.scheduler.core.prefill_pacing import PrefillPacing
from services.scheduler.core.request import InputChunk, Request, RequestStatus, TurnEnd
from services.scheduler.core.running_planner import RunningPlanner
from services.scheduler.core.running_requests import RunningRequests
from services.scheduler.core.step_builder import StepBuilder
from services.scheduler.core.step_encoder import StepEncoder
from services.scheduler.core.waiting_requests import WaitingRequests

LOOKUP_BATCH = 32
"""Waiting requests whose prefix is looked up in one transaction."""


class Scheduler:
    """Requests of one replica: those that run, those that wait, and the plan of each step.

    Decisions are those of vLLM V1's scheduler; what differs is that memory is a transaction away.
    Not safe for concurrent calls: one engine loop drives it.
    """

    def __init__(
        self, config: SchedulerConfig, pool: KVPool, connector: KVConnector | None = None
    ) -> None:
        """`connector` is given if the configuration has a `kv_role`."""
        if (connector is None) != (config.kv_role is None):
            raise ValueError("a connector and its kv_role go together")
        self.config = config
        self._policy = find_policy(config.policy)
        self.queues = WaitingRequests(self._policy)
        self._failed: dict[Request, str] = {}
        """Waiting requests that steps looked at and that can never run, and why."""
        self.running = RunningRequests()
        self.encoder_cache = EncoderCacheManager(config.encoder_cache_size)
        self.num_preemptions = 0
        self.pause_mode: PauseMode | None = None
        self._kv_cache_manager = KVCacheManager(config, pool)
        self._running_planner = RunningPlanner(config, self.running, self._kv_cache_manager)
        self._admission_planner = AdmissionPlanner(config)
        self._pacing = PrefillPacing(config.prefill_schedule_interval)
        self.transfers: KVTransfers | None = None
        if connector is not None:
            self.transfers = KVTransfers(config, connector, self._kv_cache_manager)
            self._connector_admission = ConnectorAdmission(
                config,
                self.queues,
                self.running,
                self._kv_cache_manager,
                self.transfers,
                self._admit,
            )
        self._only_grows = config.only_grows
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        """Rows of the workers' batch; the one that was freed last is taken first."""
        self._removed_rows: list[int] = []
        """Rows that were freed and that the workers are to empty with the next step."""
        self._num_steps = 0
        self._in_flight: list[SchedulerOutput] = []
        """Planned steps whose output has not come."""
        self._last_updated_step = -1

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, if only send operations to pool or workers."""
        has_operations = self._kv_cache_manager.has_operations or self._removed_rows
        return bool(has_operations) or self.has_transfers or self.has_requests

    @property
    def has_transfers(self) -> bool:
        """Whether a transfer of keys and values is under way: steps go on to hear of its end."""
        return self.transfers is not None and self.transfers.is_busy

    @property
    def has_requests(self) -> bool:
        """Whether requests run, or could be admitted before something else has happened."""
        if self.pause_mode is None:
            return bool(self.running) or self.queues.has_admissible
        if self.pause_mode is PauseMode.WAIT:
            return bool(self.running) or self.queues.has_admissible_with_blocks
        return False

    @property
    def waiting(self) -> RequestQueue:
        """Requests that wait without blocks, and are not held back."""
        return self.queues.waiting

    @property
    def kv_waiting(self) -> RequestQueue:
        """Requests that wait with blocks."""
        return self.queues.kv_waiting

    @property
    def passed_over(self) -> Mapping[Request, WaitReason]:
        """Requests that were passed over since they began to wait, and why the last time."""
        return self.queues.passed_over

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, those that are held back included."""
        return len(self.queues)

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *self.queues]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request held after the last transaction."""
        return self._kv_cache_manager.num_free_blocks

    @property
    def next_candidates(self) -> Iterable[Request]:
        """Waiting requests whose admission the next step may try."""
        passed_over = self.queues.passed_over
        ready = (request for request in self.queues.queued if request not in passed_over)
        return islice(ready, min(self._num_free_places, LOOKUP_BATCH))

    @property
    def _num_free_places(self) -> int:
        """How many more requests may run. A session between two turns keeps its place."""
        num_taken = len(self.running) + len(self.queues.between_turns)
        return max(0, self.config.max_running - num_taken)

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""
        if self.config.pooling:
            request.max_num_tokens = request.num_prompt_tokens
        else:
            request.limit_length(self.config.max_model_len)
        self.queues.add(request)

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        """Gives a session that has not ended its next input; None ends it after the turn that runs
        or waits, and at once between two turns.
        """
        if session.status is not RequestStatus.WAITING_FOR_CHUNK:
            session.chunks.append(chunk)
        elif chunk is None:
            self.queues.remove(session)
            session.finish(FinishReason.ABORT)
            self._free(session)
        else:
            self.queues.begin_turn(session, chunk, self.config.max_model_len)

    def grammar_compiled(self, request: Request, error: str = "") -> None:
        """Notes that the workers have the grammar of a request, or why they cannot have it. Does
        nothing if the request has ended.
        """
        if not request.is_finished:
            request.grammar = GrammarStatus.FAILED if error else GrammarStatus.READY
            request.error = error

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, whether it runs or waits. Does nothing if it has ended."""
        if not request.is_finished:
            self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        queue = self.running if request.status is RequestStatus.RUNNING else self.queues
        queue.remove(request)
        request.finish(reason)
        self._free(request)

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Holds back all requests but these, also those that arrive later; None lets all be
        admitted again. No request may run. They are queued in the order in which they arrived,
        and those that wait with blocks lose them.
        """
        if self.running:
            raise AssertionError("requests run that are to be held back")
        self._release_waiting()
        self.queues.admit_only(requests)

    def pause(self, mode: PauseMode) -> None:
        """Notes that the caller plans no step until `resume`. With ABORT it ends all requests; with
        WAIT it plans steps, which admit no request, while requests run.
        """
        self.pause_mode = mode

    def resume(self) -> None:
        """Notes that steps are planned again."""
        self.pause_mode = None

    async def schedule(
        self, traceparent: str = "", *, throttle_prefills: bool = False
    ) -> SchedulerOutput:
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

        `throttle_prefills` lets prompts wait, if requests decode: see `PrefillPacing`. In a pause
        that keeps or ended all requests nothing is computed.
        """
        builder = self._new_builder()
        if self.pause_mode not in (None, PauseMode.WAIT):
            reason = WaitReason.PAUSED if self.num_waiting else None
            return self._finish_step(builder, reason, computes=False)
        builder.defers_prefills = self._pacing.defers_prefills(
            self.running, throttled=throttle_prefills
        )
        self._kv_cache_manager.begin_step()
        await self._schedule_running(builder, traceparent)
        wait_reason: WaitReason | None = WaitReason.NO_BLOCKS
        if not builder.plan.preemptions:
            wait_reason = await self._schedule_waiting(builder, traceparent)
            if not builder.defers_prefills:
                self._pacing.admitted(left_waiting=self._left_waiting())
        self._pacing.planned(builder)
        if self._kv_cache_manager.has_copies:
            builder.plan.copies = await self._kv_cache_manager.release_copies(traceparent)
        return self._finish_step(builder, wait_reason)

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Appends the sampled tokens of a step, also to requests that were preempted while it ran,
        and ends requests that are done, as those are whose prompt was pooled. Requests that ended
        while it ran are passed over, and so are those whose tokens of this step are dropped. A
        session begins its next turn, or waits for it.
        """
        self._last_updated_step = plan.step
        self._in_flight = [later for later in self._in_flight if later.step > plan.step]
        failed = self._failed_loads(plan, output)
        self._take_off_fast_path(plan, output)
        self._free_encoder_inputs(plan)
        taken: list[Sequence[int] | None] = list(output.token_ids)
        ended: list[Request] = []
        turns: dict[Request, TurnEnd] = {}
        indexes = range(len(plan.requests))
        for index, request, tokens in zip(indexes, plan.requests, output.token_ids, strict=True):
            if request.is_on_fast_path and tokens and tokens[0] not in request.ending_token_ids:
                request.token_ids.append(tokens[0])
            elif request.finish_reason is not None or request in plan.dropped:
                taken[index] = None
            elif index in output.nan_requests:
                request.finish(FinishReason.NAN_IN_LOGITS)
                taken[index] = ()
                ended.append(request)
            elif tokens:
                taken[index] = self._update_request_with_output(plan, output, index)
                if request.finish_reason is not None:
                    if self._goes_on(request):
                        turns[request] = self._end_turn(request)
                    else:
                        ended.append(request)
            elif index in output.pooled:
                request.finish(FinishReason.STOP)
                ended.append(request)
        self._remove(ended)
        for request in failed:
            self._end(request, FinishReason.KV_LOAD_FAILED)
        if self.transfers is not None:
            self.transfers.finished(output.kv_transfers)
        ended += failed
        unable = self._end_failed()
        num_tokens = sum(map(len, filter(None, taken)))
        return EngineCoreOutputs(
            plan,
            taken,
            output.logprobs,
            [*ended, *unable],
            num_tokens,
            turns,
            output.execute_nanos,
            output.pooled,
            unable,
        )

    def reset_encoder_cache(self) -> None:
        """Forgets the embeddings of all items, as for other weights; the workers are not told."""
        self.encoder_cache.reset()

    def _free_encoder_inputs(self, plan: SchedulerOutput) -> None:
        """Lets requests of a step give up the items that are computed, and not only planned."""
        if not self.encoder_cache.users:
            return
        for request in plan.requests:
            if request in self.encoder_cache.users:
                num_tokens = request.num_computed_tokens
                if self.config.async_scheduling:
                    num_tokens -= request.num_output_placeholders
                self.encoder_cache.free_computed(request, num_tokens)

    def end_failed(self) -> list[Request]:
        """Ends the waiting requests that steps looked at and that can never run, where no step is
        in flight whose update would. Returns them in the order of their arrival.
        """
        return self._end_failed()

    def _end_failed(self) -> list[Request]:
        failures, self._failed = self._failed, {}
        failed = [request for request in failures if not request.is_finished]
        failed.sort(key=lambda request: request.key)
        for request in failed:
            request.fail(failures[request])
        self._remove(failed)
        return failed

    def preempt_all(self) -> list[Request]:
        """Preempts every running request, in an order that keeps theirs in the queue. Their tokens
        in flight are dropped.
        """
        for plan in self._in_flight:
            plan.dropped.update(set(plan.requests).intersection(self.running))
        return self._preempt_running()

    def forget_pool(self) -> list[Request]:
        """Starts over with an empty pool and empty workers. Returns the requests that ran."""
        victims = self._preempt_running()
        if self.transfers is not None:
            self.transfers.forget()
        self._release_waiting()
        for request in self.waiting:
            request.forget_blocks()
        self._kv_cache_manager.forget()
        self.encoder_cache.reset()
        self._removed_rows = []
        self._in_flight = []
        self._last_updated_step = self._num_steps - 1
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
                builder, growing, leaving, looked_up, self._num_in_flight(), traceparent
            )
            if outcome.stop is None:
                return
            request = growing[outcome.stop.item_index]
            if self._waits_for_blocks():
                await self._end_running(builder, request, traceparent)
                return
            begin, num_decided = self._make_room(builder, request)

    def _waits_for_blocks(self) -> bool:
        """Whether a request that lacks blocks waits for those that transfers, or steps in flight,
        are about to give back: preempting another would not make room now.
        """
        if self.transfers is None:
            return False
        victim = self._policy.victim(self.running)
        return self.transfers.connector.has_pending_block_frees() or self.transfers.is_written(
            victim, self._in_flight
        )

    async def _end_running(self, builder: StepBuilder, request: Request, traceparent: str) -> None:
        """Leaves out of the step a request and all behind it in the order of admission."""
        builder.unschedule_from(request)
        for later in self.running.between(self.running.index(request), len(self.running)):
            self.running.leave_fast_path(later)
        looked_up = list[Request]()
        if not builder.plan.preemptions:
            looked_up = self._not_looked_up(builder, self._candidates(builder))
        leaving = self.running.leaving_fast_path()
        await self._kv_cache_manager.grow(
            builder, [], leaving, looked_up, self._num_in_flight(), traceparent
        )

    def _make_room(self, builder: StepBuilder, request: Request) -> tuple[int, int | None]:
        """Preempts a request because `request` lacks blocks. Returns the index in the order of
        admission from which to plan again, and the tokens that `request` was scheduled, unless it
        is the victim itself.
        """
        num_decided = builder.unschedule_from(request)
        builder.encoder.take_back_from(request)
        victim = self._policy.victim(self.running)
        index, victim_index = self.running.index(request), self.running.index(victim)
        builder.unschedule(victim)
        builder.plan.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        if victim is request:
            return index, None
        builder.encoder.keep(request)
        return index - 1 if victim_index < index else index, num_decided

    def _preempt_running(self) -> list[Request]:
        victims = list(reversed(self.running))
        for victim in victims:
            self._preempt(victim)
        return victims

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        if self.config.requires_kv_delivery:
            self._drop_in_flight(request)
        request.awaited_step = self._last_step_sampling(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._free(request)
        self.queues.prepend(request)

    def _last_step_sampling(self, request: Request) -> int | None:
        """The last step in flight that gives a request a token; None if there is none."""
        for plan in reversed(self._in_flight if not request.is_prefill_chunk else ()):
            if request in plan.requests and request not in plan.dropped:
                return plan.step
        return None

    def _release_waiting(self) -> None:
        """Frees the blocks of requests that wait with them; they are computed again."""
        for request in reversed(list(self.kv_waiting)):
            self.kv_waiting.remove(request)
            self._free(request)
            self.queues.prepend(request)

    # Step 2: waiting requests

    async def _schedule_waiting(self, builder: StepBuilder, traceparent: str) -> WaitReason | None:
        """Admits from the head of the queue; returns why it stopped before the queue was empty."""
        if self.transfers is not None:
            return await self._connector_admission.schedule(builder, self.pause_mode, traceparent)
        while candidates := self._candidates(builder):
            if unknown := self._not_looked_up(builder, candidates):
                await self._kv_cache_manager.look_up(builder, unknown, traceparent)
            planned = self._admission_planner.plan(
                builder,
                candidates,
                num_running=len(self.running),
                num_free_places=self._num_free_places,
                num_free_blocks=self.num_free_blocks,
            )
            terms = [admission.terms for admission in planned.admissions]
            outcome = await self._kv_cache_manager.admit(terms, traceparent)
            self._settle(builder, planned, outcome.admitted)
            if outcome.stop is not None:
                if outcome.stop.reason is StopReason.NO_BLOCKS:
                    self._refuse(builder, planned.admissions[len(outcome.admitted)])
                    return WaitReason.NO_BLOCKS
                changed = planned.admissions[len(outcome.admitted)].request
                stop = outcome.stop
                builder.note_hit(changed, stop.num_hit_tokens, stop.shared_prefix_boundary)
            elif planned.wait_reason is not None and not planned.admissions:
                self._refuse(builder, planned.refused)
                return planned.wait_reason
        return self._why_others_wait(builder)

    def _left_waiting(self) -> bool:
        """Whether a request waits for what others have."""
        passed_over = self.queues.passed_over
        return any(request not in passed_over for request in self.queues.queued)

    def _why_others_wait(self, builder: StepBuilder) -> WaitReason | None:
        """Why those wait that were no candidates for admission."""
        first = next(self.queues.queued, None)
        if first is None:
            return WaitReason.HELD_BACK if self.queues.held_back else None
        if self.pause_mode is PauseMode.WAIT:
            return WaitReason.PAUSED
        if builder.token_budget == 0:
            return WaitReason.BUDGET
        if not self._num_free_places:
            return WaitReason.MAX_SEQS
        return builder.plan.passed_over[first]

    @property
    def _looked_at(self) -> Iterable[Request]:
        """Requests that may be admitted; in a pause only those that hold blocks."""
        return self.queues.queued if self.pause_mode is None else self.kv_waiting

    def _candidates(self, builder: StepBuilder) -> list[Request]:
        """The head of the queue, as far as rows and budget could reach, without those that were
        passed over in this step. Those that will be take no row.
        """
        if not (self.waiting or self.kv_waiting):
            return []
        num_ready = min(self._num_free_places, builder.token_budget, LOOKUP_BATCH)
        passed_over, candidates = builder.plan.passed_over, list[Request]()
        for request in self._looked_at:
            if num_ready <= 0:
                break
            if request not in passed_over:
                candidates.append(request)
                num_ready -= builder.passing_over.reason(request) is None
        return candidates

    def _not_looked_up(self, builder: StepBuilder, candidates: Sequence[Request]) -> list[Request]:
        """The candidates whose prefix must be looked up: those that may be admitted. Of those that
        hold blocks it is known what is stored.
        """
        not_looked_up = list[Request]()
        for request in candidates:
            if request in builder.hits or builder.passing_over.reason(request) is not None:
                continue
            if request.holds_blocks:
                self._kv_cache_manager.hash_continuation(request)
                builder.hits[request] = request.num_computed_tokens
            else:
                not_looked_up.append(request)
        return not_looked_up

    def _settle(
        self, builder: StepBuilder, planned: AdmissionPlan, admitted: Sequence[BlockTables]
    ) -> None:
        """Admits those that the pool has blocks for, and passes over those planned before and
        between them.
        """
        passed_over = deque(planned.passed_over)
        for number in range(len(admitted) + 1):
            while passed_over and passed_over[0].num_admissions == number:
                self._pass_over(builder, passed_over.popleft())
            if number < len(admitted):
                self._admit(builder, planned.admissions[number], admitted[number])

    def _pass_over(self, builder: StepBuilder, passed: PassedOver) -> None:
        request, reason = passed.request, passed.reason
        builder.plan.passed_over[request] = self.queues.passed_over[request] = reason
        if passed.num_asked:
            builder.encoder.decide(request, passed.num_computed_tokens, passed.num_asked)
        if request.grammar is GrammarStatus.FAILED:
            self._failed[request] = request.error
        elif passed.error:
            self._failed[request] = passed.error

    def _refuse(self, builder: StepBuilder, refused: PlannedAdmission | None) -> None:
        """Tests the items of a request that lacks blocks, as vLLM does before it asks for them."""
        if refused is not None:
            start = refused.terms.num_computed_tokens
            builder.encoder.refuse(refused.request, start, refused.num_asked)

    def _admit_items(self, builder: StepBuilder, admission: PlannedAdmission) -> None:
        """Takes room for the items of an admitted request that the encoder computes."""
        start, request = admission.terms.num_computed_tokens, admission.request
        if start < request.num_encoded_tokens:
            decision = builder.encoder.decide(request, start, admission.num_asked)
            builder.encoder.allocate(request, decision)
            if decision.inputs:
                builder.plan.encoder_inputs[request] = decision.inputs

    def _admit(
        self, builder: StepBuilder, admission: PlannedAdmission, blocks: BlockTables
    ) -> None:
        request, terms = admission.request, admission.terms
        self.queues.remove(request)
        self.running.append(request)
        builder.passing_over.admit(request)
        size = self.config.hash_block_size
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.take_blocks(terms, blocks, self.config.block_size, size)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = terms.num_computed_tokens
        if self.transfers is not None:
            num_new_tokens, num_external = admission.num_new_tokens, terms.num_external_tokens
            self.transfers.admitted(request, blocks, num_new_tokens, num_external)
        request.draft_token_ids = [-1] * admission.num_drafts
        self._admit_items(builder, admission)
        builder.schedule(request, admission.num_new_tokens + admission.num_drafts)
        builder.plan.block_tables[request] = blocks
        if self._only_grows:
            begin = terms.num_hit_tokens // size
            builder.published.update(request.block_hashes[begin : request.num_committed_blocks])
        (builder.plan.resumed if terms.resumed else builder.plan.new).append(request)

    # Both steps

    def _new_builder(self) -> StepBuilder:
        config = self.config
        num_requests = len(self.running) + len(self.kv_waiting) + len(self.waiting)
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive and num_requests:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
            if config.aligns_states:  # or no step would reach the end of a block
                threshold = max(threshold, config.block_size)
        if num_requests <= 1:
            threshold = 0
        running = self.running if self.waiting or self.kv_waiting else ()
        passing_over = PassingOver(config.max_loras, running, self._last_updated_step)
        plan = SchedulerOutput(self._num_steps)
        encoder = StepEncoder(config, self.encoder_cache, config.encoder_compute_budget)
        return StepBuilder(plan, config.token_budget, threshold, passing_over, encoder)

    def _finish_step(
        self, builder: StepBuilder, wait_reason: WaitReason | None, *, computes: bool = True
    ) -> SchedulerOutput:
        """The planned step; from here on its tokens count as computed, if it `computes` any."""
        plan = builder.plan
        plan.wait_reason = wait_reason
        plan.num_tokens = sum(plan.num_scheduled_tokens)
        plan.removed_rows, self._removed_rows = self._removed_rows, []
        plan.block_ids_to_zero = self._kv_cache_manager.pop_block_ids_to_zero()
        plan.evicted_encoder_inputs = self.encoder_cache.take_evicted()
        self._failed |= builder.failed
        self._num_steps += 1
        if computes:
            self._running_planner.update_after_schedule(builder, self._num_in_flight())
        if plan.requests:
            self._in_flight.append(plan)
        if self.transfers is not None:
            self.transfers.planned(plan)
        return plan

    # Steps in flight

    def _num_in_flight(self) -> Callable[[Request], int]:
        """Of a request, the tokens of steps that were planned and whose output has not come. 0
        where block tables only grow, since it is not used there.
        """
        if self._only_grows:
            return lambda _: 0
        steps = [
            dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True))
            for plan in self._in_flight
        ]
        return lambda request: sum(step.get(request, 0) for step in steps)

    # After a step

    def _failed_loads(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Drops what the step computed from keys and values that were not loaded. Returns the
        requests that end for that, in the order in which they arrived.
        """
        if self.transfers is None:
            return []
        self.transfers.processed(plan)
        affected = self.transfers.take_failures(
            output.kv_transfers, plan, self.kv_waiting, self.running
        )
        plan.dropped |= affected
        if self.config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE:
            return []
        return sorted(affected, key=lambda request: request.key)

    def _take_off_fast_path(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Takes requests off the fast path whose tokens are not just appended; in a pause also
        those whose steps on it are over: planning, which would do that, stands still.
        """
        if self.pause_mode is not None:
            self.running.take_due_off_fast_path()
        looked_at = (*output.nan_requests, *output.refused_tokens)
        for request in (*map(plan.requests.__getitem__, looked_at), *plan.dropped):
            self.running.leave_fast_path(request)

    def _update_request_with_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, index: int
    ) -> Sequence[int]:
        """Appends the tokens of a request; returns those up to its end, if it ended."""
        request = plan.requests[index]
        kept = request.append_output_token_ids(output.token_ids[index])
        if output.refused_tokens.get(index, len(kept)) < len(kept):
            request.fail("the request's grammar refuses a token that was sampled")
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
            queue = self.queues if request.row is None else self.running
            queue.remove(request)
            self._free(request)

    def _goes_on(self, session: Request) -> bool:
        """Whether a request is a session that its end does not end."""
        failed = session.finish_reason in (FinishReason.NAN_IN_LOGITS, FinishReason.ERROR)
        ends = failed or not session.resumable
        return not ends and not (session.chunks and session.chunks[0] is None)

    def _end_turn(self, session: Request) -> TurnEnd:
        """Lets a session begin its next turn, or wait for its input. What steps in flight sample of
        it comes after the end of the turn, and is dropped.
        """
        self._drop_in_flight(session)
        queue = self.queues if session.row is None else self.running
        queue.remove(session)
        end = session.end_turn(self.config.hash_block_size)
        self._free_row(session)
        if session.chunks and (chunk := session.chunks.popleft()) is not None:
            session.begin_turn(chunk, self.config.max_model_len)
        self.queues.add(session)
        return end

    def _drop_in_flight(self, request: Request) -> None:
        """Takes no token of a request that a step in flight samples."""
        for plan in self._in_flight:
            if request in plan.requests:
                plan.dropped.add(request)

    def _free(self, request: Request) -> None:
        """Frees the row of a request and, with the next transaction, its blocks."""
        if self.transfers is not None and request.is_finished:
            self.transfers.ended(request, self._in_flight)
        else:
            self._kv_cache_manager.release(request)
        if self.transfers is not None:
            self.transfers.preempted(request)
        self.encoder_cache.free(request)
        self._free_row(request)
        request.forget_blocks()

    def _free_row(self, request: Request) -> None:
        if request.row is not None:
            self._free_rows.append(request.row)
            self._removed_rows.append(request.row)
            request.row = None
