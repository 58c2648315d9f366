"""Plans the admissions of waiting requests by arithmetic, without asking the pool of KV blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash
from services.common.pool.operations import Admission
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import WaitReason
from services.scheduler.core.planning import step_encoder
from services.scheduler.core.planning.chunks import aligned_chunk
from services.scheduler.core.planning.step_builder import PassingOver, StepBuilder
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.request import Request, RequestStatus


@dataclass(slots=True)  # see Admission
class PlannedAdmission:
    request: Request
    terms: Admission
    """The pool's operation, which allocates the request's blocks."""
    num_new_tokens: int
    """Number of tokens that the request's first step computes, without drafts."""
    num_asked: int
    """Number of tokens that the step would compute if the encoder (of images) had no limits."""
    num_drafts: int
    """Number of empty draft tokens in the first step. `terms.num_slots` includes them."""

    @property
    def num_tokens(self) -> int:
        return self.num_new_tokens + self.num_drafts


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A waiting request that the step skips."""

    request: Request
    reason: WaitReason
    num_computed_tokens: int = 0
    num_asked: int = 0
    """With `reason` ENCODER, the number of tokens as in `PlannedAdmission`. Otherwise 0."""
    error: str = ""
    """Why the request can never be admitted. Empty if a later step may admit it."""


@dataclass(slots=True)
class AdmissionPlan:
    """Planned admissions of the candidates, the first waiting requests."""

    decisions: list[PlannedAdmission | PassedOver] = field(default_factory=list)
    """One decision for each examined candidate, valid if all earlier admissions succeed."""
    admissions: list[PlannedAdmission] = field(default_factory=list)
    """The admissions in `decisions`."""
    wait_reason: WaitReason | None = None
    """Why the plan stopped before the last candidate. None if it did not, or if `has_old_hits`."""
    refused: PlannedAdmission | None = None
    """The admission of the first candidate, if the pool certainly has too few free blocks."""
    has_old_hits: bool = False
    """Whether the plan stopped at a candidate that must be looked up again, because an earlier
    admission may change its prefix hit. An admission can evict cached blocks. With sliding windows
    or states, only the pool knows which blocks an admission publishes (caches for prefix hits).
    """

    def stop(self, reason: WaitReason, *, hit_is_old: bool = False) -> "AdmissionPlan":
        """Sets `wait_reason`, or `has_old_hits` if `hit_is_old` is true. Returns the plan."""
        if hit_is_old:
            self.has_old_hits = True
        else:
            self.wait_reason = reason
        return self


@dataclass(slots=True)
class _Trial:
    """What the step would be if all admissions planned so far succeeded."""

    budget: int
    published: set[BlockHash]
    """Hashes of the blocks that the planned admissions publish."""
    passing_over: PassingOver
    encoder: step_encoder.StepEncoder | None = None
    """A copy of the step's `StepEncoder`. None until a candidate has items for the encoder."""


@dataclass(frozen=True, slots=True)
class AdmissionPlanner:
    """Plans all admissions of a step in advance, so that one transaction can perform them."""

    config: SchedulerConfig
    retention: Retention | None = None

    def plan(
        self,
        builder: StepBuilder,
        candidates: Sequence[Request],
        *,
        num_running: int,
        num_free_slots: int,
        num_free_blocks: int,
    ) -> AdmissionPlan:
        """Plans admissions of the candidates in order, until the rows of the batch or the token
        budget are used up.

        The prefix hit of a candidate is the result of its last lookup in the pool. Blocks that
        earlier admissions of the step publish extend the hit, if `config.foretells_hits` is true.
        The plan stops at a candidate if only the pool can compute its new hit. If the first
        candidate certainly needs more blocks than are free, nothing is planned. This saves a
        transaction in every step until enough blocks are free.
        """
        prefixes = builder.prefixes
        trial = _Trial(builder.token_budget, set(prefixes.published), builder.passing_over.copy())
        plan = AdmissionPlan()
        for request in candidates:
            has_slot = len(plan.admissions) < num_free_slots
            if trial.budget == 0 or not has_slot:
                return plan.stop(WaitReason.BUDGET if has_slot else WaitReason.MAX_SEQS)
            reason = trial.passing_over.reason(request)
            if reason is not None:
                plan.decisions.append(PassedOver(request, reason))
                continue
            hit, is_old = self._hit(builder, trial, request, is_first=not plan.admissions)
            start = hit + prefixes.external.get(request, 0)
            if builder.defers_prefills and start < request.num_tokens - 1:
                return plan.stop(WaitReason.PREFILL_INTERVAL, hit_is_old=is_old)
            num_asked = self._num_new_tokens(builder, request, start, trial.budget)
            decision = self._decide_items(builder, trial, request, start, num_asked)
            num_new = num_asked if decision is None else decision.num_tokens
            if decision is not None and num_new == 0:
                if is_old:
                    return plan.stop(WaitReason.ENCODER, hit_is_old=True)
                error = decision.mismatch and step_encoder.mismatch_error(decision.mismatch)
                passed = PassedOver(request, WaitReason.ENCODER, start, num_asked, error)
                plan.decisions.append(passed)
                continue
            joins = bool(num_running or plan.admissions)
            planned = self._admission(
                builder, request, hit, num_new, num_asked, trial.budget, joins=joins
            )
            if self.retention is not None:
                self.retention.limit(planned.terms, request, num_running + len(plan.admissions))
            if num_new == 0 or planned.num_tokens > trial.budget:
                return plan.stop(WaitReason.BUDGET, hit_is_old=is_old)
            if not plan.admissions and self._blocks_needed(planned) > num_free_blocks:
                plan.refused = planned
                return plan.stop(WaitReason.NO_BLOCKS)
            plan.decisions.append(planned)
            plan.admissions.append(planned)
            self._take(trial, planned)
        return plan

    def _hit(
        self, builder: StepBuilder, trial: _Trial, request: Request, *, is_first: bool
    ) -> tuple[int, bool]:
        """The length of a request's prefix hit in tokens, and whether an earlier admission of the
        plan may change the hit. The hit of a request that already holds blocks never changes.
        """
        hit, foretells_hits = builder.prefixes.hits[request], self.config.foretells_hits
        if request.holds_blocks:
            return hit, False
        if foretells_hits:
            size, hashes = self.config.hash_block_size, request.block_hashes
            num_blocks, most = hit // size, min(request.max_hit_tokens // size, len(hashes))
            while num_blocks < most and hashes[num_blocks] in trial.published:
                num_blocks += 1
            if self.config.drop_last_hit_block and num_blocks * size > hit:
                num_blocks -= 1
            hit = num_blocks * size
        return hit, not is_first and (hit > 0 or not foretells_hits)

    def _take(self, trial: _Trial, planned: PlannedAdmission) -> None:
        request, terms, size = planned.request, planned.terms, self.config.hash_block_size
        if self.config.foretells_hits:
            begin, end = terms.num_hit_tokens, terms.num_computed_tokens + planned.num_new_tokens
            trial.published.update(request.block_hashes[begin // size : end // size])
        trial.budget -= planned.num_tokens
        trial.passing_over.admit(request)

    @staticmethod
    def _decide_items(
        builder: StepBuilder, trial: _Trial, request: Request, start: int, num_new: int
    ) -> step_encoder.EncoderDecision | None:
        """Decides which prompt items (such as images) the encoder computes. None without items."""
        if not num_new or start >= request.num_encoded_tokens:
            return None
        trial.encoder = trial.encoder or builder.encoder.copy()
        decision = trial.encoder.decide(request, start, num_new)
        if decision.num_tokens:
            trial.encoder.allocate(request, decision)
        return decision

    def _num_new_tokens(
        self, builder: StepBuilder, request: Request, start: int, budget: int
    ) -> int:
        """Number of tokens that a request's first step computes. 0 if the prompt must not be
        chunked and exceeds the budget, or if no chunk can end where a recurrent state can be
        cached.
        """
        gap = builder.cap(request.num_tokens - start)
        if gap > budget and not self.config.enable_chunked_prefill:
            return 0
        num_new, config = min(gap, budget), self.config
        return aligned_chunk(config, request, start, num_new) if config.aligns_states else num_new

    def _admission(
        self,
        builder: StepBuilder,
        request: Request,
        hit: int,
        num_new: int,
        num_asked: int,
        budget: int,
        *,
        joins: bool,
    ) -> PlannedAdmission:
        config, prefixes = self.config, builder.prefixes
        num_external_tokens = prefixes.external.get(request, 0)
        start = hit + num_external_tokens
        end = start + num_new
        num_drafts = self._padding(builder, request, start, end, budget)
        holds_blocks, num_lookahead = request.holds_blocks, config.num_lookahead_tokens
        terms = Admission(
            request=request.key,
            max_hit_tokens=hit if holds_blocks else prefixes.max_hit_tokens(request),
            num_hit_tokens=hit,
            num_slots=min(end + num_drafts + num_lookahead, config.max_model_len),
            num_commit_tokens=end,
            num_reserve_slots=config.num_reserve_slots(request.num_tokens),
            num_watermark_blocks=config.num_watermark_blocks if joins else 0,
            traceparent=request.traceparent,
            resumed=request.status is RequestStatus.PREEMPTED,
            num_external_tokens=num_external_tokens,
            holds_blocks=holds_blocks,
            new_hashes=request.unsent_hashes if holds_blocks else (),
            num_tokens=end + num_drafts if num_lookahead else None,
            num_stored_tokens=prefixes.num_stored.get(request),
            num_prompt_tokens=request.num_prompt_tokens,
            shared_prefix_boundary=request.shared_prefix_boundary,
            diverges=request in prefixes.diverging,
        )
        return PlannedAdmission(request, terms, num_new, num_asked, num_drafts)

    def _padding(
        self, builder: StepBuilder, request: Request, start: int, end: int, budget: int
    ) -> int:
        """The number of empty drafts that are added to a request with one token to compute, so that
        it has as many tokens in the step as each decoding request. 0 if

        * the request has more than one token to compute;
        * the number of drafts depends on the number of requests;
        * the step computes a prompt chunk of a running request;
        * no running request is scheduled, and no token of the request is computed;
        * the drafts exceed `max_model_len`, the step's whole token budget, or the limit on the
          tokens of one request in the step.

        If the drafts exceed only `budget`, their number is returned, so that the request waits for
        a later step.
        """
        num_drafts = self.config.num_speculative_tokens
        if self.config.num_speculative_rows or end - start != 1 or end != request.num_tokens:
            return 0
        if any(scheduled.is_prefill_chunk for scheduled in builder.off_fast_path):
            return 0
        if end + num_drafts >= self.config.max_model_len or num_drafts >= self.config.token_budget:
            return 0
        has_running_requests = len(builder.plan.requests) > len(builder.plan.block_tables)
        if not (has_running_requests or start):
            return 0
        num_tokens = 1 + num_drafts
        if num_tokens <= budget:
            num_tokens = builder.cap(num_tokens)
            if self.config.aligns_states:
                # If the chunk must end before its last draft, the request gets no drafts.
                num_tokens = aligned_chunk(self.config, request, start, num_tokens)
        return num_drafts if num_tokens > num_drafts else 0

    def _blocks_needed(self, planned: PlannedAdmission) -> int:
        """A lower bound on the number of blocks that must be free for an admission. Counts the
        watermark, and blocks of KV-cache groups of full-attention layers. 0 if the request holds
        blocks of which some may have been freed, because only the pool knows how many are left.
        """
        terms = planned.terms
        if terms.holds_blocks and not self.config.only_grows:
            return 0
        slots = max(terms.num_reserve_slots, terms.num_slots)
        held = planned.request.num_slots or terms.num_hit_tokens
        return terms.num_watermark_blocks + sum(
            max(0, -(-slots // size) - -(-held // size)) for size in self.config.full_block_sizes
        )
