"""The policy: who gets how many tokens in a step, who waits, who makes room."""

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import islice

from services.common.pool_operations import BlockTables, StopReason
from services.scheduler.core.admission import AdmissionPlanner, PlannedAdmission
from services.scheduler.core.chunks import aligned_chunk
from services.scheduler.core.config import Policy, SchedulerConfig
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import STANDING, FinishReason, Request, RequestStatus
from services.scheduler.core.request_queue import create_request_queue
from services.scheduler.core.running_requests import RunningRequests
from services.scheduler.core.step_builder import StepBuilder


class PauseMode(Enum):
    """What a pause makes of the requests that are alive."""

    KEEP = "keep"
    ABORT = "abort"


LOOKUP_BATCH = 32
"""Waiting requests whose prefix is looked up in one transaction."""


class Scheduler:
    """Requests of one replica: those that run, those that wait, and the plan of each step.

    Decisions are those of vLLM V1's scheduler; what differs is that memory is a transaction away.
    Not safe for concurrent calls: one engine loop drives it.
    """

    def __init__(self, config: SchedulerConfig, pool: KVPool) -> None:
        self.config = config
        self.waiting = create_request_queue(config.policy)
        self.held_back: dict[Request, None] = {}
        """Requests that must not be admitted now, in the order in which they were held back."""
        self.running = RunningRequests()
        self.num_preemptions = 0
        self.pause_mode: PauseMode | None = None
        self._memory = KVCacheManager(config, pool)
        self._planner = AdmissionPlanner(config)
        self._caches_states = config.caches_states
        self._only: Collection[Request] | None = None
        self._num_steps = 0
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._removed_rows: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests, or news for pool and workers."""
        return bool(self.running or self.waiting or self._memory.has_news or self._removed_rows)

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
        """Blocks that nobody held after the last transaction."""
        return self._memory.num_free_blocks

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""
        longest = request.num_prompt_tokens + request.stop.max_tokens
        request.max_num_tokens = min(longest, self.config.max_model_len)
        if self._only is None:
            self.waiting.add(request)
        else:
            self.held_back[request] = None

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it stands; one that has ended is left alone."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.held_back:
            del self.held_back[request]
        else:
            self.waiting.remove(request)
        request.finish(reason)
        self._give_back(request)

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Holds back all requests but these, those that arrive later too; None lets all be admitted
        again. No request may run. They are queued in the order in which they arrived.
        """
        if self.running:
            raise AssertionError("requests run that are to be held back")
        queued = sorted([*self.waiting, *self.held_back], key=lambda request: request.key)
        self._only = requests
        self.waiting = create_request_queue(self.config.policy)
        self.held_back.clear()
        for request in queued:
            if requests is None or request in requests:
                self.waiting.add(request)
            else:
                self.held_back[request] = None

    def pause(self, mode: PauseMode) -> None:
        """Notes that no step is to be planned until `resume`. Whoever drives the steps heeds it,
        and ends what is to be ended.
        """
        self.pause_mode = mode

    def resume(self) -> None:
        """Notes that steps are planned again."""
        self.pause_mode = None

    async def schedule(self, traceparent: str = "") -> SchedulerOutput:
        """Plans one step and reserves its memory.

        There is no prefill and no decode. Each request has tokens, and a count of those that are
        computed; a step hands out a budget of tokens so that the count catches up:

        1. Running requests first, in the order in which they were admitted. What they need grows
           in one transaction with the pool. Whoever does not fit makes a victim of the last (or,
           by priority, the least important) of them, and tries again.
        2. Then, if nobody was preempted, waiting requests from the head of the queue, each with
           what is cached of its prompt, until budget, places or blocks are used up. The head
           never gives way to those behind it.
        """
        draft = self._new_draft()
        await self._schedule_running(draft, traceparent)
        wait_reason: WaitReason | None = WaitReason.NO_BLOCKS
        if not draft.preemptions:
            wait_reason = await self._schedule_waiting(draft, traceparent)
        return self._close(draft, wait_reason)

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Takes in what the workers sampled; ends requests that are done.

        Requests that ended while the step ran are passed over; one that was preempted meanwhile
        still gets its tokens.
        """
        for index in output.nan_requests:
            self.running.rouse(plan.requests[index])
        taken: list[Sequence[int] | None] = list(output.token_ids)
        ended: list[Request] = []
        places = range(len(plan.requests))
        for index, request, tokens in zip(places, plan.requests, output.token_ids, strict=True):
            if (
                request.clock is not STANDING
                and tokens
                and tokens[0] not in request.ending_token_ids
            ):
                request.token_ids.append(tokens[0])
            elif request.finish_reason is not None:
                taken[index] = None
            elif index in output.nan_requests:
                request.finish(FinishReason.NAN_IN_LOGITS)
                taken[index] = ()
                ended.append(request)
            elif tokens:
                taken[index] = self._append(plan, output, index)
                if request.finish_reason is not None:
                    ended.append(request)
        self._remove(ended)
        return EngineCoreOutputs(plan, taken, output.logprobs, ended)

    def preempt_all(self) -> list[Request]:
        """Sends every running request back to the queue, in an order that keeps theirs."""
        return self._preempt_running()

    def forget_pool(self) -> list[Request]:
        """Starts over with an empty pool, empty workers and no step in flight.

        Nothing but computation is lost. Returns the requests that ran.
        """
        victims = self._preempt_running()
        for request in self.waiting:
            request.forget_blocks()
        self._memory.forget()
        self._removed_rows.clear()
        return victims

    async def flush(self) -> None:
        """Tells the pool now what would otherwise go with the next step."""
        await self._memory.flush()

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while blocks are in use."""
        return await self._memory.reset_prefix_cache()

    # Step 1: running requests

    async def _schedule_running(self, draft: StepBuilder, traceparent: str) -> None:
        index, decided = 0, None
        while True:
            growing = self._grant_running(draft, index, decided)
            asking = [] if draft.preemptions else self._candidates(draft)
            waking = self.running.waking()
            outcome = await self._memory.grow(draft, growing, waking, asking, traceparent)
            if outcome.stop is None:
                return
            index, decided = self._make_room(draft, growing[outcome.stop.item_index])

    def _grant_running(self, draft: StepBuilder, index: int, decided: int | None) -> list[Request]:
        """Gives budget to the running requests from `index` on; returns those that need blocks.

        `decided` are the tokens of the request at `index`, where a victim made room for them: the
        budget that the victim gives back goes to the requests behind, as in vLLM.

        Most of them get one token, and most of those are asleep: they are not looked at.
        """
        running, memory = self.running, self._memory
        growing: list[Request] = []
        enough = draft.budget >= len(running) - index
        for request in running.awake(index):
            num_new = self._gap(draft, request) if decided is None else decided
            decided = None
            if num_new == 1 and enough:
                draft.awake[request] = 1
            else:
                place = running.place(request)
                self._grant_each(draft, index, place)
                index = place + 1
                num_new = min(num_new, draft.budget)
                if self._caches_states:
                    num_new = aligned_chunk(self.config, request, request.origin, num_new)
                if num_new <= 0:
                    continue
                draft.grant(request, num_new)
                enough = draft.budget >= len(running) - index
            if memory.lacks_slots(request, request.origin + num_new):
                growing.append(request)
        self._grant_each(draft, index, len(running))
        return growing

    def _grant_each(self, draft: StepBuilder, begin: int, end: int) -> None:
        """Gives one token to each of the running requests between two places, as far as the budget
        goes; the others cannot sleep through this step.
        """
        if begin < end:
            last = min(end, begin + draft.budget)
            draft.grant_each(self.running.between(begin, last))
            for request in self.running.between(last, end):
                self.running.rouse(request)

    def _gap(self, draft: StepBuilder, request: Request) -> int:
        """Tokens that a running request lacks and may be given in one step."""
        computed, known = request.origin, len(request.token_ids)
        gap = known - computed
        if gap <= 0:
            # The next token is in flight. It may be the last, even if every draft is rejected.
            if known + 1 >= request.num_prompt_tokens + request.stop.max_tokens:
                return 0
            gap = 1
        if request.draft_token_ids:
            gap += len(request.draft_token_ids)
        longest = self.config.max_model_len - 1 - computed
        return min(draft.cap(gap), longest) if gap > 1 or longest < 1 else 1

    def _make_room(self, draft: StepBuilder, request: Request) -> tuple[int, int | None]:
        """Preempts for `request`; returns the index from which to go on granting, and the tokens
        that `request` was given, unless it is the victim itself.
        """
        decided = draft.revoke_from(request)
        victim = self._victim()
        index, place = self.running.place(request), self.running.place(victim)
        draft.revoke(victim)
        draft.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        if victim is request:
            return index, None
        return index - 1 if place < index else index, decided

    def _victim(self) -> Request:
        if self.config.policy is Policy.PRIORITY:
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return next(reversed(self.running))

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
        self._give_back(request)
        self.waiting.put_back(request)

    # Step 2: waiting requests

    async def _schedule_waiting(self, draft: StepBuilder, traceparent: str) -> WaitReason | None:
        """Admits from the head of the queue; returns why it stopped before the queue was empty."""
        while candidates := self._candidates(draft):
            if asking := [request for request in candidates if request not in draft.hits]:
                await self._memory.look_up(draft, asking, traceparent)
            planned, blocked = self._planner.plan(
                draft,
                candidates,
                num_running=len(self.running),
                num_free_blocks=self.num_free_blocks,
            )
            if not planned:
                return blocked
            outcome = await self._memory.admit([item.terms for item in planned], traceparent)
            admitted = outcome.admitted
            for request, item, blocks in zip(candidates, planned, admitted, strict=False):
                self._admit(draft, request, item, blocks)
            if outcome.stop is not None:
                if outcome.stop.reason is StopReason.NO_BLOCKS:
                    return WaitReason.NO_BLOCKS
                draft.hits[candidates[len(admitted)]] = outcome.stop.num_hit_tokens
        if not self.waiting:
            return WaitReason.HELD_BACK if self.held_back else None
        return WaitReason.BUDGET if draft.budget == 0 else WaitReason.MAX_SEQS

    def _candidates(self, draft: StepBuilder) -> list[Request]:
        """The head of the queue, as far as places and budget could reach."""
        if not self.waiting:
            return []
        places = self.config.max_running - len(self.running)
        return list(islice(self.waiting, max(0, min(places, draft.budget, LOOKUP_BATCH))))

    def _admit(
        self, draft: StepBuilder, request: Request, admission: PlannedAdmission, blocks: BlockTables
    ) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        size = self.config.block_size
        terms = admission.terms
        hit, num_committed_blocks = terms.num_hit_tokens, terms.num_commit_tokens // size
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.origin = hit
        request.num_slots = len(blocks[0]) * size
        request.num_committed_blocks = num_committed_blocks
        request.known_to_pool = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit
        request.draft_token_ids = [-1] * admission.num_drafts
        draft.grant(request, admission.num_new_tokens + admission.num_drafts)
        draft.tables[request] = blocks
        if not self._caches_states:
            draft.published.update(request.block_hashes[hit // size : num_committed_blocks])
        (draft.resumed if terms.resumed else draft.new).append(request)

    # Both steps

    def _new_draft(self) -> StepBuilder:
        config, alive = self.config, len(self.running) + len(self.waiting)
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive and alive:
            threshold = max(threshold, config.max_num_batched_tokens // alive)
        if threshold and self._caches_states:
            threshold = max(threshold, config.block_size)
        return StepBuilder(budget=config.token_budget, threshold=threshold if alive > 1 else 0)

    def _close(self, draft: StepBuilder, wait_reason: WaitReason | None) -> SchedulerOutput:
        """Turns the draft into a plan; from here on its tokens count as computed."""
        plan = SchedulerOutput(
            step=self._num_steps,
            requests=draft.requests,
            num_scheduled_tokens=draft.num_tokens,
            num_computed_tokens=draft.starts,
            block_tables=draft.tables,
            appended_blocks=draft.appended,
            draft_token_ids=draft.draft_token_ids,
            new=draft.new,
            resumed=draft.resumed,
            preemptions=draft.preemptions,
            wait_reason=wait_reason,
            removed_rows=self._removed_rows,
            block_ids_to_zero=self._memory.take_block_ids_to_zero(),
        )
        self._num_steps += 1
        self._removed_rows = []
        self.running.clock.now += 1
        for request, num_new in draft.awake.items():
            request.origin = computed = request.origin + num_new
            request.is_prefill_chunk = computed < len(request.token_ids)
            if self.config.num_speculative_tokens:
                request.draft_token_ids = self._placeholder_drafts(request)
            elif (
                not request.is_prefill_chunk
                and (num_steps := self._stride_end(request) - computed) > 0
            ):
                self.running.sleep(request, num_steps)
        return plan

    def _placeholder_drafts(self, request: Request) -> list[int]:
        """Drafts that the workers will make in the step and keep to themselves."""
        if not self.config.async_scheduling or request.is_prefill_chunk:
            return []
        return [-1] * self.config.num_speculative_tokens

    def _stride_end(self, request: Request) -> int:
        """The first number of computed tokens at which a decode takes a look: for a slot, for its
        length, or because a block was filled. 0 where it always does.
        """
        if request.stop.repetition is not None:
            return 0
        config = self.config
        end = min(request.num_slots - config.num_lookahead_tokens, request.max_num_tokens - 2)
        if config.enable_prefix_caching:
            filled = (request.num_committed_blocks + 1) * config.block_size
            return end if end < filled else filled
        return end

    # After a step

    def _append(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, index: int
    ) -> Sequence[int]:
        """Appends the tokens of a request; returns those up to its end, if it ended."""
        request = plan.requests[index]
        kept = request.append_output_token_ids(output.token_ids[index])
        drafts = plan.draft_token_ids.get(request)
        if drafts and request.num_computed_tokens:
            # Drafts that were rejected, or came after the end, were never computed.
            request.origin -= len(drafts) + 1 - len(kept)
        if output.draft_token_ids and not self.config.async_scheduling:
            request.draft_token_ids = list(output.draft_token_ids[index])
        if request.row is not None:
            self._memory.publish_known(request)
        return kept

    def _remove(self, ended: list[Request]) -> None:
        """Takes out requests that have ended. One may end in the queue, by a token that was in
        flight when it was preempted.
        """
        for request in ended:
            queue = self.waiting if request.row is None else self.running
            queue.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Frees what a request holds: its blocks with the next transaction, its row with it."""
        self._memory.release(request)
        if request.row is not None:
            self._free_rows.append(request.row)
            self._removed_rows.append(request.row)
        request.forget_blocks()
