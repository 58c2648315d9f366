"""The policy: who gets how many tokens in a step, who waits, who makes room."""

from collections.abc import Iterator, Sequence
from itertools import islice

from services.common.block_hash import BlockHash
from services.scheduler.core.config import Policy, SchedulerConfig
from services.scheduler.core.draft import StepDraft
from services.scheduler.core.plan import RequestUpdate, StepOutput, StepPlan
from services.scheduler.core.ports import (
    Admission,
    Admit,
    BlockTables,
    Commit,
    Grow,
    KVPool,
    Lookup,
    Operation,
    Outcome,
    Release,
    ResetPrefixCache,
    StopReason,
)
from services.scheduler.core.queue import make_queue
from services.scheduler.core.request import FinishReason, Request, RequestStatus

LOOKUP_BATCH = 32
"""Waiting requests whose prefix is looked up in one transaction."""


class Scheduler:
    """Requests of one replica: those that run, those that wait, and the plan of each step.

    Decisions are those of vLLM V1's scheduler; what differs is that memory is a transaction away.
    Not safe for concurrent calls: one engine loop drives it.
    """

    def __init__(self, config: SchedulerConfig, pool: KVPool) -> None:
        self.config = config
        self.waiting = make_queue(config.policy)
        self.running: list[Request] = []
        self.num_free_blocks = config.num_blocks - 1
        self.num_preemptions = 0
        self._pool = pool
        self._num_steps = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._removed_slots: list[int] = []
        self._releases: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests, or news for pool and workers."""
        return bool(self.running or self.waiting or self._releases or self._removed_slots)

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""
        self.waiting.add(request)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it stands; one that has ended is left alone."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.finish(reason)
        self._give_back(request)

    async def schedule(self, traceparent: str = "") -> StepPlan:
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
        if not draft.preempted:
            await self._schedule_waiting(draft, traceparent)
        return self._close(draft)

    def update_from_output(self, plan: StepPlan, output: StepOutput) -> list[RequestUpdate]:
        """Takes in what the workers sampled; ends requests that are done.

        Requests that ended while the step ran are passed over. The updates are in scheduling
        order, only for requests with new tokens or an end.
        """
        updates: list[RequestUpdate] = []
        for index, request in enumerate(plan.requests):
            if request.is_finished:
                continue
            if index in output.nan_requests:
                request.finish(FinishReason.ERROR)
                updates.append(RequestUpdate(request, []))
            elif (tokens := output.token_ids[index]) or index in output.logprobs:
                kept = self._append(request, tokens)
                logprobs, start = output.logprobs.get(index), plan.num_computed_tokens[index]
                updates.append(RequestUpdate(request, kept, logprobs, start))
        if any(update.request.is_finished for update in updates):
            self.running = [request for request in self.running if not request.is_finished]
            for update in updates:
                if update.request.is_finished:
                    self._give_back(update.request)
        return updates

    def preempt_all(self) -> list[Request]:
        """Sends every running request back to the queue, in an order that keeps theirs."""
        victims = self.running[::-1]
        for victim in victims:
            self._preempt(victim)
        return victims

    def forget_pool(self) -> list[Request]:
        """Starts over with an empty pool and empty workers; nothing but computation is lost.

        Returns the requests that ran.
        """
        victims = self.preempt_all()
        for request in self.waiting:
            request.forget_blocks()
        self._releases.clear()
        self._removed_slots.clear()
        self.num_free_blocks = self.config.num_blocks - 1
        return victims

    async def flush(self) -> None:
        """Gives back to the pool now what would otherwise go with the next step."""
        await self._transact([], "")

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while blocks are in use."""
        outcome = await self._transact([ResetPrefixCache()], "")
        return outcome.reset_done

    # Step 1: running requests

    async def _schedule_running(self, draft: StepDraft, traceparent: str) -> None:
        index = 0
        while True:
            growing = self._grant_running(draft, index)
            operations = [
                *self._grow(draft, growing),
                *self._commit(draft),
                *(() if draft.preempted else self._look_up(draft)),
            ]
            outcome = await self._transact(operations, traceparent)
            for request, blocks in zip(growing, outcome.grown, strict=False):
                request.num_slots += len(blocks[0]) * self.config.block_size
                draft.appended[request] = blocks
            if outcome.stop is None:
                return self._settle(draft, outcome)
            index = self._make_room(draft, growing[outcome.stop.item_index])

    def _grant_running(self, draft: StepDraft, index: int) -> list[Request]:
        """Gives budget to the running requests from `index` on; returns those that need blocks."""
        growing: list[Request] = []
        longest = self.config.max_model_len - 1
        for request in islice(self.running, index, None):
            if draft.budget == 0:
                break
            computed = request.num_computed_tokens
            gap = min(draft.cap(len(request.token_ids) - computed), draft.budget)
            num_new = min(gap, longest - computed)
            if num_new > 0:
                draft.grant(request, num_new)
                if computed + num_new > request.num_slots:
                    growing.append(request)
        return growing

    def _grow(self, draft: StepDraft, growing: list[Request]) -> Iterator[Operation]:
        if growing:
            granted = dict(zip(draft.requests, draft.num_tokens, strict=True))
            computed = [request.num_computed_tokens for request in growing]
            yield Grow(
                [request.key for request in growing],
                computed,
                [request.num_computed_tokens + granted[request] for request in growing],
            )

    def _commit(self, draft: StepDraft) -> Iterator[Operation]:
        """Publishes what the step fills; after all growth, so that no victim is published."""
        if not self.config.enable_prefix_caching:
            return
        draft.filling = []
        for request, num_new in zip(draft.requests, draft.num_tokens, strict=True):
            end = request.num_computed_tokens + num_new
            if end >= (request.num_committed_blocks + 1) * self.config.block_size:
                draft.filling.append((request, end))
        if draft.filling:
            yield Commit(
                [request.key for request, _ in draft.filling],
                [end for _, end in draft.filling],
                [self._unsent_hashes(request) for request, _ in draft.filling],
            )

    def _make_room(self, draft: StepDraft, request: Request) -> int:
        """Preempts for `request`; returns the index from which to go on granting."""
        draft.revoke_from(request)
        victim = self._victim()
        index, place = self.running.index(request), self.running.index(victim)
        draft.revoke(victim)
        draft.preempted.append(victim)
        self._preempt(victim)
        return index - 1 if place < index else index

    def _victim(self) -> Request:
        if self.config.policy is Policy.PRIORITY:
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._give_back(request)
        self.waiting.put_back(request)

    # Step 2: waiting requests

    async def _schedule_waiting(self, draft: StepDraft, traceparent: str) -> None:
        while candidates := self._candidates(draft):
            if any(request not in draft.hits for request in candidates):
                outcome = await self._transact([*self._look_up(draft)], traceparent)
                self._settle(draft, outcome)
            admissions = self._plan_admissions(draft, candidates)
            if not admissions:
                return
            outcome = await self._transact([Admit(admissions)], traceparent)
            for request, admission, blocks in zip(
                candidates, admissions, outcome.admitted, strict=False
            ):
                self._admit(draft, request, admission, blocks)
            if outcome.stop is not None:
                if outcome.stop.reason is StopReason.NO_BLOCKS:
                    return
                draft.hits[candidates[len(outcome.admitted)]] = outcome.stop.num_hit_tokens

    def _candidates(self, draft: StepDraft) -> list[Request]:
        """The head of the queue, as far as places and budget could reach."""
        places = self.config.max_running - len(self.running)
        return list(islice(self.waiting, max(0, min(places, draft.budget, LOOKUP_BATCH))))

    def _look_up(self, draft: StepDraft) -> Iterator[Operation]:
        draft.asking = [r for r in self._candidates(draft) if r not in draft.hits]
        if not self.config.enable_prefix_caching:
            draft.hits.update(dict.fromkeys(draft.asking, 0))
        elif draft.asking:
            yield Lookup(
                [request.key for request in draft.asking],
                [request.max_hit_tokens for request in draft.asking],
                [self._unsent_hashes(request) for request in draft.asking],
            )

    def _plan_admissions(self, draft: StepDraft, candidates: list[Request]) -> list[Admission]:
        """Terms for the candidates, in order, as far as budget and free blocks seem to reach.

        A hit is what the pool said, and after that what earlier admissions of the step publish.
        """
        size, budget = self.config.block_size, draft.budget
        published = set(draft.published)
        admissions: list[Admission] = []
        for request in candidates:
            hit = self._hit(draft, request, published)
            gap = draft.cap(request.num_tokens - hit)
            if budget == 0 or (gap > budget and not self.config.enable_chunked_prefill):
                break
            end = hit + min(gap, budget)
            budget -= end - hit
            admission = self._terms(request, hit, end, joins=bool(self.running or admissions))
            if not admissions and not self._may_fit(admission):
                break
            published.update(request.block_hashes[hit // size : end // size])
            admissions.append(admission)
        return admissions

    def _hit(self, draft: StepDraft, request: Request, published: set[BlockHash]) -> int:
        size = self.config.block_size
        blocks = draft.hits[request] // size
        longest = min(request.max_hit_tokens // size, len(request.block_hashes))
        while blocks < longest and request.block_hashes[blocks] in published:
            blocks += 1
        return blocks * size

    def _terms(self, request: Request, hit: int, end: int, *, joins: bool) -> Admission:
        reserve = request.num_tokens if self.config.scheduler_reserve_full_isl else end
        return Admission(
            key=request.key,
            max_hit_tokens=request.max_hit_tokens,
            num_hit_tokens=hit,
            num_slots=end,
            num_commit_tokens=end,
            num_reserve_slots=reserve,
            num_watermark_blocks=self.config.num_watermark_blocks if joins else 0,
            traceparent=request.traceparent,
            resumed=request.status is RequestStatus.PREEMPTED,
        )

    def _may_fit(self, admission: Admission) -> bool:
        """False when the pool would refuse for sure: saves asking it in vain, step after step."""
        size = self.config.block_size
        needed = -(-admission.num_reserve_slots // size) - admission.num_hit_tokens // size
        return needed + admission.num_watermark_blocks <= self.num_free_blocks

    def _admit(
        self, draft: StepDraft, request: Request, admission: Admission, blocks: BlockTables
    ) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        hit, end, size = admission.num_hit_tokens, admission.num_slots, self.config.block_size
        draft.grant(request, end - hit)
        draft.tables[request] = blocks
        draft.published.update(request.block_hashes[hit // size : end // size])
        (draft.resumed if admission.resumed else draft.new).append(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = hit
        request.num_slots = len(blocks[0]) * size
        request.num_committed_blocks = end // size
        request.known_to_pool = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit

    # Both steps

    def _new_draft(self) -> StepDraft:
        config, alive = self.config, len(self.running) + len(self.waiting)
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive and alive:
            threshold = max(threshold, config.max_num_batched_tokens // alive)
        return StepDraft(budget=config.token_budget, threshold=threshold if alive > 1 else 0)

    async def _transact(self, operations: list[Operation], traceparent: str) -> Outcome:
        """One turn on the pool, giving back first what is to be given back; none for nothing."""
        if self._releases:
            operations = [Release(tuple(self._releases)), *operations]
        if not operations:
            return Outcome(self.num_free_blocks)
        outcome = await self._pool.transact(operations, traceparent)
        self._releases.clear()
        self.num_free_blocks = outcome.num_free_blocks
        return outcome

    def _settle(self, draft: StepDraft, outcome: Outcome) -> None:
        """Notes what the pool has been told once it has taken it in."""
        for request, end in draft.filling:
            known = min(end, request.num_tokens)
            request.num_committed_blocks = known // self.config.block_size
            request.num_hashes_sent = len(request.block_hashes)
        for request, hit in zip(draft.asking, outcome.hits, strict=False):
            draft.hits[request] = hit
            request.num_hashes_sent = len(request.block_hashes)
            request.known_to_pool = True
        draft.filling, draft.asking = [], []

    def _unsent_hashes(self, request: Request) -> list[BlockHash]:
        request.hash_full_blocks(self.config.fingerprint, self.config.block_size)
        return request.block_hashes[request.num_hashes_sent :]

    def _close(self, draft: StepDraft) -> StepPlan:
        """Turns the draft into a plan; from here on its tokens count as computed."""
        plan = StepPlan(
            step=self._num_steps,
            requests=draft.requests,
            num_scheduled_tokens=draft.num_tokens,
            num_computed_tokens=[request.num_computed_tokens for request in draft.requests],
            block_tables=draft.tables,
            appended_blocks=draft.appended,
            new=draft.new,
            resumed=draft.resumed,
            preempted=draft.preempted,
            removed_slots=self._removed_slots,
        )
        self._num_steps += 1
        self._removed_slots = []
        for request, num_new in zip(draft.requests, draft.num_tokens, strict=True):
            request.num_computed_tokens += num_new
        return plan

    def _append(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """Appends sampled tokens up to one that ends the request; returns those kept."""
        for count, token_id in enumerate(token_ids, start=1):
            if request.append_output(token_id, self.config.max_model_len):
                return token_ids[:count]
        return token_ids

    def _give_back(self, request: Request) -> None:
        """Frees what a request holds: its blocks with the next transaction, its slot with it."""
        if request.known_to_pool:
            self._releases.append(request.key)
        if request.slot is not None:
            self._free_slots.append(request.slot)
            self._removed_slots.append(request.slot)
        request.forget_blocks()
