"""The policy: who gets how many tokens in a step, who waits, who makes room."""

from collections.abc import Iterator, Sequence
from itertools import islice

from services.common.block_hash import BlockHash
from services.scheduler.core.admission import AdmissionPlanner
from services.scheduler.core.config import Policy, SchedulerConfig
from services.scheduler.core.draft import StepDraft
from services.scheduler.core.pending import PendingOperations
from services.scheduler.core.plan import (
    Preemption,
    StepOutput,
    StepPlan,
    StepUpdate,
    WaitReason,
)
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
        self._planner = AdmissionPlanner(config)
        self._pending = PendingOperations()
        self._num_steps = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._removed_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests, or news for pool and workers."""
        return bool(self.running or self.waiting or self._pending or self._removed_slots)

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""
        longest = request.num_prompt_tokens + request.stop.max_tokens
        request.max_num_tokens = min(longest, self.config.max_model_len)
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
        wait_reason: WaitReason | None = WaitReason.NO_BLOCKS
        if not draft.preemptions:
            wait_reason = await self._schedule_waiting(draft, traceparent)
        return self._close(draft, wait_reason)

    def update_from_output(self, plan: StepPlan, output: StepOutput) -> StepUpdate:
        """Takes in what the workers sampled; ends requests that are done.

        Requests that ended while the step ran are passed over; one that was preempted meanwhile
        still gets its tokens.
        """
        taken: list[Sequence[int] | None] = list(output.token_ids)
        ended: list[Request] = []
        for index, request in enumerate(plan.requests):
            tokens = taken[index]
            if request.finish_reason is not None:
                taken[index] = None
            elif index in output.nan_requests:
                request.finish(FinishReason.ERROR)
                taken[index] = ()
                ended.append(request)
            elif tokens:
                if (
                    request.num_computed_tokens < request.stride_end
                    and tokens[0] not in request.stop.ending_token_ids
                ):
                    request.token_ids.append(tokens[0])
                    continue
                taken[index] = self._append(plan, output, index)
                if request.finish_reason is not None:
                    ended.append(request)
        self._remove(ended)
        return StepUpdate(plan, taken, output.logprobs, ended)

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
        self._pending.clear()
        self._removed_slots.clear()
        self.num_free_blocks = self.config.num_blocks - 1
        return victims

    async def flush(self) -> None:
        """Tells the pool now what would otherwise go with the next step."""
        await self._transact(self._pending.take(), "")

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while blocks are in use."""
        outcome = await self._transact([*self._pending.take(), ResetPrefixCache()], "")
        return outcome.reset_done

    # Step 1: running requests

    async def _schedule_running(self, draft: StepDraft, traceparent: str) -> None:
        index = 0
        while True:
            growing = self._grant_running(draft, index)
            operations = [
                *self._pending.take(),
                *self._grow(draft, growing),
                *self._commit(draft),
                *(() if draft.preemptions else self._look_up(draft)),
            ]
            outcome = await self._transact(operations, traceparent)
            for request, blocks in zip(growing, outcome.grown, strict=False):
                request.num_slots += len(blocks[0]) * self.config.block_size
                draft.appended[request] = blocks
            if outcome.stop is None:
                return self._settle(draft, outcome)
            index = self._make_room(draft, growing[outcome.stop.item_index])

    def _grant_running(self, draft: StepDraft, index: int) -> list[Request]:
        """Gives budget to the running requests from `index` on; returns those that need blocks.

        Most decode in stride: one comparison tells that one more token is all there is to it.
        """
        requests, num_tokens, starts = draft.requests, draft.num_tokens, draft.starts
        growing: list[Request] = []
        for request in islice(self.running, index, None):
            if draft.budget == 0:
                break
            computed = request.num_computed_tokens
            if computed < request.stride_end:
                requests.append(request)
                num_tokens.append(1)
                starts.append(computed)
                draft.budget -= 1
            elif (num_new := self._gap(draft, request)) > 0:
                draft.grant(request, num_new)
                if self._num_slots(computed + num_new) > request.num_slots:
                    growing.append(request)
        return growing

    def _gap(self, draft: StepDraft, request: Request) -> int:
        """Tokens that a running request lacks, as far as this step can give them."""
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        if placeholders and _surely_ends(request, placeholders):
            return 0
        ahead = request.num_tokens + len(request.draft_token_ids) + placeholders
        gap = min(draft.cap(ahead - computed), draft.budget)
        return min(gap, self.config.max_model_len - 1 - computed)

    def _num_slots(self, num_tokens: int) -> int:
        """Slots that a running request needs for its first `num_tokens` to be computed."""
        return min(num_tokens + self.config.num_lookahead_tokens, self.config.max_model_len)

    def _grow(self, draft: StepDraft, growing: list[Request]) -> Iterator[Operation]:
        if growing:
            computed = [request.num_computed_tokens for request in growing]
            slots = [
                self._num_slots(request.num_computed_tokens + draft.out_of_stride[request])
                for request in growing
            ]
            yield Grow([request.key for request in growing], computed, slots)

    def _commit(self, draft: StepDraft) -> Iterator[Operation]:
        """Publishes what the step fills; after all growth, so that no victim is published."""
        if not self.config.enable_prefix_caching:
            return
        draft.filling = []
        for request, num_new in draft.out_of_stride.items():
            end = min(request.num_computed_tokens + num_new, request.num_tokens)
            if end // self.config.block_size > request.num_committed_blocks:
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
        draft.preemptions.append(Preemption(victim, request, victim.num_computed_tokens))
        self._preempt(victim)
        return index - 1 if place < index else index

    def _victim(self) -> Request:
        if self.config.policy is Policy.PRIORITY:
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def _preempt_running(self) -> list[Request]:
        victims = self.running[::-1]
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

    async def _schedule_waiting(self, draft: StepDraft, traceparent: str) -> WaitReason | None:
        """Admits from the head of the queue; returns why it stopped before the queue was empty."""
        while candidates := self._candidates(draft):
            if any(request not in draft.hits for request in candidates):
                outcome = await self._transact([*self._look_up(draft)], traceparent)
                self._settle(draft, outcome)
            admissions, blocked = self._planner.plan(
                draft,
                candidates,
                num_running=len(self.running),
                num_free_blocks=self.num_free_blocks,
            )
            if not admissions:
                return blocked
            outcome = await self._transact([Admit(admissions)], traceparent)
            admitted = zip(candidates, admissions, outcome.admitted, strict=False)
            for request, admission, blocks in admitted:
                self._admit(draft, request, admission, blocks)
            if outcome.stop is not None:
                if outcome.stop.reason is StopReason.NO_BLOCKS:
                    return WaitReason.NO_BLOCKS
                draft.hits[candidates[len(outcome.admitted)]] = outcome.stop.num_hit_tokens
        if not self.waiting:
            return None
        return WaitReason.BUDGET if draft.budget == 0 else WaitReason.MAX_SEQS

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

    def _admit(
        self, draft: StepDraft, request: Request, admission: Admission, blocks: BlockTables
    ) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        size = self.config.block_size
        hit, end = admission.num_hit_tokens, admission.num_commit_tokens
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = hit
        request.num_slots = len(blocks[0]) * size
        request.num_committed_blocks = end // size
        request.known_to_pool = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit
        request.draft_token_ids = [-1] * admission.num_drafts
        draft.grant(request, end - hit + admission.num_drafts)
        draft.tables[request] = blocks
        draft.published.update(request.block_hashes[hit // size : end // size])
        (draft.resumed if admission.resumed else draft.new).append(request)

    # Both steps

    def _new_draft(self) -> StepDraft:
        config, alive = self.config, len(self.running) + len(self.waiting)
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive and alive:
            threshold = max(threshold, config.max_num_batched_tokens // alive)
        return StepDraft(budget=config.token_budget, threshold=threshold if alive > 1 else 0)

    async def _transact(self, operations: list[Operation], traceparent: str) -> Outcome:
        """One turn on the pool; none for nothing."""
        if not operations:
            return Outcome(self.num_free_blocks)
        outcome = await self._pool.transact(operations, traceparent)
        self.num_free_blocks = outcome.num_free_blocks
        return outcome

    def _settle(self, draft: StepDraft, outcome: Outcome) -> None:
        """Notes what the pool has been told once it has taken it in."""
        for request, end in draft.filling:
            request.num_committed_blocks = end // self.config.block_size
            request.num_hashes_sent = len(request.block_hashes)
        for request, hit in zip(draft.asking, outcome.hits, strict=False):
            draft.hits[request] = hit
            request.num_hashes_sent = len(request.block_hashes)
            request.known_to_pool = True
        draft.filling, draft.asking = [], []

    def _unsent_hashes(self, request: Request) -> list[BlockHash]:
        request.hash_full_blocks(self.config.fingerprint, self.config.block_size)
        return request.block_hashes[request.num_hashes_sent :]

    def _close(self, draft: StepDraft, wait_reason: WaitReason | None) -> StepPlan:
        """Turns the draft into a plan; from here on its tokens count as computed."""
        plan = StepPlan(
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
            removed_slots=self._removed_slots,
        )
        self._num_steps += 1
        self._removed_slots = []
        for request, start, num_new in zip(
            draft.requests, draft.starts, draft.num_tokens, strict=True
        ):
            request.num_computed_tokens = start + num_new
        for request in draft.out_of_stride:
            request.is_in_prefill = request.num_computed_tokens < request.num_tokens
            request.draft_token_ids = []
            if self.config.async_scheduling and not request.is_in_prefill:
                request.draft_token_ids = [-1] * self.config.num_speculative_tokens
            request.stride_end = 0 if request.is_in_prefill else self._stride_end(request)
        return plan

    def _stride_end(self, request: Request) -> int:
        """The first number of computed tokens at which a step takes more than one token more: a
        slot, a block to publish, a draft, or a look at its length.
        """
        if self.config.num_speculative_tokens:
            return 0
        ends = [request.num_slots - self.config.num_lookahead_tokens, request.max_num_tokens - 2]
        if self.config.enable_prefix_caching:
            ends.append((request.num_committed_blocks + 1) * self.config.block_size - 1)
        return min(ends)

    # After a step

    def _append(self, plan: StepPlan, output: StepOutput, index: int) -> Sequence[int]:
        """Appends the tokens of a request; returns those up to its end, if it ended."""
        request = plan.requests[index]
        num_drafts = len(plan.draft_token_ids.get(request, ()))
        kept = request.append_output(output.token_ids[index])
        if num_drafts and request.num_computed_tokens:
            # Drafts that were rejected, or came after the end, were never computed.
            request.num_computed_tokens -= num_drafts + 1 - len(kept)
        if output.draft_token_ids and not self.config.async_scheduling:
            request.draft_token_ids = list(output.draft_token_ids[index])
        if request.slot is not None:
            self._commit_known(request)
        return kept

    def _commit_known(self, request: Request) -> None:
        """Publishes blocks that a step filled with tokens which nobody knew when it was planned.

        The last token is known, but not computed.
        """
        blocks = (request.num_tokens - 1) // self.config.block_size
        if self.config.enable_prefix_caching and blocks > request.num_committed_blocks:
            hashes = self._unsent_hashes(request)
            self._pending.commit(request.key, request.num_tokens - 1, hashes)
            request.num_committed_blocks = blocks
            request.num_hashes_sent = len(request.block_hashes)

    def _remove(self, ended: list[Request]) -> None:
        """Takes out requests that have ended. One may end in the queue, by a token that was in
        flight when it was preempted.
        """
        if any(request.slot is not None for request in ended):
            self.running = [request for request in self.running if request.finish_reason is None]
        for request in ended:
            if request.slot is None:
                self.waiting.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Frees what a request holds: its blocks with the next transaction, its slot with it."""
        if request.known_to_pool:
            self._pending.release(request.key)
        if request.slot is not None:
            self._free_slots.append(request.slot)
            self._removed_slots.append(request.slot)
        request.forget_blocks()


def _surely_ends(request: Request, num_placeholders: int) -> bool:
    """Whether steps in flight bring a request to its last token, were every draft rejected."""
    tokens = request.num_computed_tokens + 2 - num_placeholders
    return tokens >= request.num_prompt_tokens + request.stop.max_tokens
