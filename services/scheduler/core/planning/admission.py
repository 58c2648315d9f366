"""Plans the admissions of waiting requests: arithmetic on tokens, no transaction."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.common.pool.block_hash import BlockHash
from services.common.pool.operations import Admission
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import WaitReason
from services.scheduler.core.planning.chunks import aligned_chunk
from services.scheduler.core.planning.passing_over import PassingOver
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.planning.step_encoder import (
    EncoderDecision,
    StepEncoder,
    mismatch_error,
)
from services.scheduler.core.request import Request, RequestStatus


@dataclass(slots=True)  # see Admission
class PlannedAdmission:
    """One admission of a step: the terms for the pool, and what it takes of the step's budget."""

    request: Request
    terms: Admission
    num_new_tokens: int
    """Tokens that its first step computes, drafts left out. Those up to `num_commit_tokens` can be
    found by other requests at once, the rest when a Commit publishes them.
    """
    num_asked: int
    """Tokens that it would compute if the encoder could compute all items."""
    num_drafts: int
    """Empty drafts that pad its first step; the slots of the terms include them."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes of the step's budget."""
        return self.num_new_tokens + self.num_drafts


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A request that is passed over, provided that the first `num_admissions` come about."""

    request: Request
    reason: WaitReason
    num_admissions: int
    num_computed_tokens: int = 0
    num_asked: int = 0
    """If the encoder has no budget or room: how many tokens it would compute, and from where on."""
    error: str = ""
    """Why it can never run, if it cannot."""


@dataclass(slots=True)
class AdmissionPlan:
    """Planned admissions of waiting requests, in the order of the queue."""

    admissions: list[PlannedAdmission] = field(default_factory=list)
    passed_over: list[PassedOver] = field(default_factory=list)
    wait_reason: WaitReason | None = None
    """Why the first that is in neither list is not; None if all are."""
    refused: PlannedAdmission | None = None
    """The admission of the first, if it certainly does not fit in the pool."""
    has_old_hits: bool = False
    """Whether the first that is in neither list would be passed over or left out for a hit that an
    admission before it may have changed: that takes blocks which are cached, and with windows and
    states publishes others. It must be looked up again.
    """

    def pass_over(
        self,
        request: Request,
        reason: WaitReason,
        num_computed_tokens: int = 0,
        num_asked: int = 0,
        error: str = "",
    ) -> None:
        """Passes over a request behind the admissions so far; see PassedOver."""
        passed_over = PassedOver(
            request, reason, len(self.admissions), num_computed_tokens, num_asked, error
        )
        self.passed_over.append(passed_over)

    def stop(self, reason: WaitReason, *, hit_is_old: bool = False) -> "AdmissionPlan":
        """The plan, as it ends before a request that waits for this reason, as far as is known: if
        its hit is old, it must be looked up again.
        """
        if hit_is_old:
            self.has_old_hits = True
        else:
            self.wait_reason = reason
        return self


@dataclass(slots=True)
class _Trial:
    """The state of the step as it will be if all admissions that are planned so far come about."""

    budget: int
    """Tokens that are left."""
    published: set[BlockHash]
    """Blocks that earlier admissions of the step publish."""
    passing_over: PassingOver
    encoder: StepEncoder | None = None
    """None as long as no candidate has items."""


@dataclass(frozen=True, slots=True)
class AdmissionPlanner:
    """Plans the admissions of a step ahead, so that one transaction makes them all."""

    config: SchedulerConfig

    def plan(
        self,
        builder: StepBuilder,
        candidates: Sequence[Request],
        *,
        num_running: int,
        num_free_places: int,
        num_free_blocks: int,
    ) -> AdmissionPlan:
        """Admissions of the candidates, in order, as far as places and budget seem to reach.

        A prefix hit is what the pool answered last, and beyond it what earlier admissions of the
        step publish, if the configuration foretells hits. Otherwise only the pool knows hits: the
        plan stops where one may have changed. If the first candidate certainly does not fit,
        none is planned: that saves a transaction in every step until it does.
        """
        prefixes = builder.prefixes
        trial = _Trial(builder.token_budget, set(prefixes.published), builder.passing_over.copy())
        plan = AdmissionPlan()
        for request in candidates:
            has_place = len(plan.admissions) < num_free_places
            if trial.budget == 0 or not has_place:
                return plan.stop(WaitReason.BUDGET if has_place else WaitReason.MAX_SEQS)
            reason = trial.passing_over.reason(request)
            if reason is not None:
                plan.pass_over(request, reason)
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
                error = decision.mismatch and mismatch_error(decision.mismatch)
                plan.pass_over(request, WaitReason.ENCODER, start, num_asked, error)
                continue
            joins = bool(num_running or plan.admissions)
            planned = self._admission(
                builder, request, hit, num_new, num_asked, trial.budget, joins=joins
            )
            if num_new == 0 or planned.num_tokens > trial.budget:
                return plan.stop(WaitReason.BUDGET, hit_is_old=is_old)
            if not plan.admissions and self._blocks_needed(planned) > num_free_blocks:
                plan.refused = planned
                return plan.stop(WaitReason.NO_BLOCKS)
            plan.admissions.append(planned)
            self._take(trial, planned)
        return plan

    def _hit(
        self, builder: StepBuilder, trial: _Trial, request: Request, *, is_first: bool
    ) -> tuple[int, bool]:
        """The tokens of a request's hit, and whether an admission before it may have changed them.
        The blocks of a request that holds some do not change.
        """
        hit, foretells_hits = builder.prefixes.hits[request], self.config.foretells_hits
        if request.holds_blocks:
            return hit, False
        if foretells_hits:
            hit = self._with_published(request, hit, trial.published)
        return hit, not is_first and (hit > 0 or not foretells_hits)

    def _take(self, trial: _Trial, planned: PlannedAdmission) -> None:
        """Changes what is left of the step as if the admission had come about."""
        request, terms, size = planned.request, planned.terms, self.config.hash_block_size
        if self.config.foretells_hits:
            begin, end = terms.num_hit_tokens, terms.num_computed_tokens + planned.num_new_tokens
            trial.published.update(request.block_hashes[begin // size : end // size])
        trial.budget -= planned.num_tokens
        trial.passing_over.admit(request)

    @staticmethod
    def _decide_items(
        builder: StepBuilder, trial: _Trial, request: Request, start: int, num_new: int
    ) -> EncoderDecision | None:
        """What the encoder computes for `num_new` tokens from `start` on, and how many of these can
        be computed then; None if they touch no item.
        """
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
        """Tokens of the first step of a request that goes on at `start`; 0 if the budget is too
        small.
        """
        gap = builder.cap(request.num_tokens - start)
        if gap > budget and not self.config.enable_chunked_prefill:
            return 0
        num_new = min(gap, budget)
        if self.config.aligns_states:
            num_new = aligned_chunk(self.config, request, start, num_new)
        return num_new

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
        prefixes = builder.prefixes
        start = hit + prefixes.external.get(request, 0)
        end = start + num_new
        num_drafts = self._padding(builder, request, start, end, budget)
        terms = self._terms(request, hit, start - hit, end, num_drafts, joins=joins)
        if request in prefixes.diverging:
            terms = replace(terms, diverges=True, max_hit_tokens=prefixes.max_hit_tokens(request))
        if request in prefixes.num_stored:
            terms = replace(terms, num_stored_tokens=prefixes.num_stored[request])
        return PlannedAdmission(request, terms, num_new, num_asked, num_drafts)

    def _with_published(self, request: Request, hit: int, published: set[BlockHash]) -> int:
        """A hit, as blocks that earlier admissions publish extend it."""
        size = self.config.hash_block_size
        blocks = hit // size
        longest = min(request.max_hit_tokens // size, len(request.block_hashes))
        while blocks < longest and request.block_hashes[blocks] in published:
            blocks += 1
        if self.config.drop_last_hit_block and blocks * size > hit:
            blocks -= 1
        return blocks * size

    def _padding(
        self, builder: StepBuilder, request: Request, start: int, end: int, budget: int
    ) -> int:
        """How many empty drafts are scheduled beside a request that has one token to compute.

        With them a step of decoding requests has one shape. There are none in a step that computes
        a further chunk of a prompt, in one without running requests if nothing of the prompt is
        cached, where the model's length, a whole step or the limit of one request in it does not
        hold them, and where their number goes by that of the requests. What is left of the step,
        `budget`, is looked at before the limit: where it does not hold them, the request waits.
        """
        if self.config.num_speculative_rows:
            return 0
        num_drafts = self.config.num_speculative_tokens
        if end - start != 1 or end != request.num_tokens or builder.has_prefill_chunks:
            return 0
        if end + num_drafts >= self.config.max_model_len or num_drafts >= self.config.token_budget:
            return 0
        if not (builder.has_running_requests or start):
            return 0
        num_tokens = 1 + num_drafts
        if num_tokens <= budget:
            num_tokens = builder.cap(num_tokens)
            if self.config.aligns_states:
                # A step that must end before the drafts has none.
                num_tokens = aligned_chunk(self.config, request, start, num_tokens)
        return num_drafts if num_tokens > num_drafts else 0

    def _terms(
        self,
        request: Request,
        hit: int,
        num_external_tokens: int,
        end: int,
        num_drafts: int,
        *,
        joins: bool,
    ) -> Admission:
        slots = end + num_drafts + self.config.num_lookahead_tokens
        slots = min(slots, self.config.max_model_len)
        return Admission(
            request=request.key,
            max_hit_tokens=hit if request.holds_blocks else request.max_hit_tokens,
            num_hit_tokens=hit,
            num_slots=slots,
            num_commit_tokens=end,
            num_reserve_slots=self.config.num_reserve_slots(request.num_tokens),
            num_watermark_blocks=self.config.num_watermark_blocks if joins else 0,
            traceparent=request.traceparent,
            resumed=request.status is RequestStatus.PREEMPTED,
            num_external_tokens=num_external_tokens,
            holds_blocks=request.holds_blocks,
            new_hashes=request.unsent_hashes if request.holds_blocks else (),
            num_tokens=end + num_drafts if self.config.num_lookahead_tokens else None,
            num_prompt_tokens=request.num_prompt_tokens,
            shared_prefix_boundary=request.shared_prefix_boundary,
        )

    def _blocks_needed(self, planned: PlannedAdmission) -> int:
        """Blocks that an admission needs at least: those of groups of full attention. Of a request
        that holds blocks only the pool knows how many it has in each of several groups.
        """
        terms = planned.terms
        if terms.holds_blocks and not self.config.only_grows:
            return 0
        slots = max(terms.num_reserve_slots, terms.num_slots)
        return terms.num_watermark_blocks + sum(
            max(
                0,
                -(-slots // size) - -(-(planned.request.num_slots or terms.num_hit_tokens) // size),
            )
            for size in self.config.full_block_sizes
        )
