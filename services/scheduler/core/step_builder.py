"""A step while it is planned: the budget left, what was scheduled, and what can be taken back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash
from services.scheduler.core.computed_tokens import num_computed_tokens_of
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.passing_over import PassingOver
from services.scheduler.core.planned_steps import PlannedSteps
from services.scheduler.core.request import Request
from services.scheduler.core.step_encoder import StepEncoder


@dataclass(slots=True)
class StepBuilder:
    """What scheduling has decided of a step so far: its `plan`, and what later decisions need."""

    plan: SchedulerOutput
    token_budget: int
    """Tokens left."""
    long_prefill_token_threshold: int
    """Most tokens of one request in this step; 0: no such limit."""
    make_passing_over: Callable[[], PassingOver]
    make_encoder: Callable[[], StepEncoder]
    defers_prefills: bool = False
    """Whether prompts wait for a later step."""
    off_fast_path: dict[Request, int] = field(default_factory=dict)
    """Of the scheduled requests that are not on the fast path, how many tokens of each are computed
    after the step.
    """
    hits: dict[Request, int] = field(default_factory=dict)
    """Cached tokens of waiting requests, by the pool's newest answer."""
    external: dict[Request, int] = field(default_factory=dict)
    """Tokens that a connector loads behind the hits of waiting requests."""
    divergent_hits: dict[Request, int] = field(default_factory=dict)
    """What full attention has cached of waiting requests, where the connector supplies states."""
    diverging: set[Request] = field(default_factory=set)
    """Waiting requests whose hit is one of full attention alone."""
    failed: dict[Request, str] = field(default_factory=dict)
    """Requests that were looked at and can never run, and why."""
    num_stored: dict[Request, int] = field(default_factory=dict)
    """To how many tokens the windows of waiting requests move on, if not to all computed ones."""
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish: later admissions of the step hit them."""

    _cut_hits: dict[Request, int] = field(default_factory=dict)
    _passing_over: PassingOver | None = None
    _encoder: StepEncoder | None = None

    @property
    def passing_over(self) -> PassingOver:
        """Which waiting requests are passed over, as of the admissions so far."""
        if self._passing_over is None:
            self._passing_over = self.make_passing_over()
        return self._passing_over

    @property
    def encoder(self) -> StepEncoder:
        """What the encoder can still compute."""
        if self._encoder is None:
            self._encoder = self.make_encoder()
        return self._encoder

    def note_hit(self, request: Request, num_tokens: int, shared_prefix_boundary: int) -> None:
        """Keeps the pool's answer for a waiting request."""
        self.hits[request] = num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary

    def cut_hit(self, request: Request, num_tokens: int) -> None:
        """Leaves of a hit what lies in whole blocks: what follows is loaded, states included."""
        self.note_hit(request, num_tokens, 0)
        self.diverging.add(request)
        self._cut_hits[request] = num_tokens

    def max_hit_tokens(self, request: Request) -> int:
        """The longest hit that a waiting request may take."""
        return self._cut_hits.get(request, request.max_hit_tokens)

    def forget_hits(self) -> None:
        """Drops what is known of cached prefixes, after an admission has changed them."""
        self.hits.clear()
        self._cut_hits.clear()
        self.divergent_hits.clear()
        self.diverging.clear()

    def go_on(self, request: Request, steps: PlannedSteps) -> None:
        """Notes what a waiting request has that holds blocks. Steps in flight of a session's last
        turn, whose tokens are dropped, still read what its windows see.
        """
        self.hits[request] = request.num_computed_tokens
        if any(request in plan.requests for plan in steps.in_flight):
            in_flight = steps.num_tokens()(request)
            self.num_stored[request] = max(0, request.num_computed_tokens - in_flight)

    @property
    def has_running_requests(self) -> bool:
        """Whether a request that ran before this step is scheduled."""
        return len(self.plan.requests) > len(self.plan.block_tables)

    @property
    def has_prefill_chunks(self) -> bool:
        """Whether a request that ran before this step computes a further chunk of its prompt."""
        return any(request.is_prefill_chunk for request in self.off_fast_path)

    def cap(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens the threshold lets one request have."""
        threshold = self.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    def schedule_one_token_each(self, requests: Sequence[Request]) -> None:
        """Schedules one token of each of these requests."""
        plan = self.plan
        plan.requests += requests
        plan.num_scheduled_tokens += [1] * len(requests)
        plan.num_computed_tokens += num_computed_tokens_of(requests)
        self.token_budget -= len(requests)

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Schedules tokens of a request off the fast path; its drafts are the last of them."""
        plan, num_computed_tokens = self.plan, request.num_computed_tokens
        plan.requests.append(request)
        plan.num_scheduled_tokens.append(num_tokens)
        plan.num_computed_tokens.append(num_computed_tokens)
        self.off_fast_path[request] = num_computed_tokens + num_tokens
        self.token_budget -= num_tokens
        if request.draft_token_ids:
            known = len(request.token_ids) + request.num_output_placeholders
            num_drafts = num_computed_tokens + num_tokens - known
            if num_drafts > 0:
                plan.draft_token_ids[request] = request.draft_token_ids[:num_drafts]

    def unschedule_from(self, request: Request) -> int:
        """Takes back the tokens of a request and of all that were scheduled after it. Returns the
        tokens that were scheduled of the request.
        """
        index = self.plan.requests.index(request)
        num_tokens = self.plan.num_scheduled_tokens[index]
        self._unschedule(slice(index, None))
        return num_tokens

    def unschedule(self, request: Request) -> None:
        """Takes back the tokens of a request, if any were scheduled."""
        if request in self.plan.requests:
            index = self.plan.requests.index(request)
            self.plan.appended_blocks.pop(request, None)
            if inputs := self.plan.encoder_inputs.get(request):
                self.encoder.give_back(request, inputs)
            self._unschedule(slice(index, index + 1))

    def _unschedule(self, indexes: slice) -> None:
        plan = self.plan
        self.token_budget += sum(plan.num_scheduled_tokens[indexes])
        for request in plan.requests[indexes]:
            plan.draft_token_ids.pop(request, None)
            plan.encoder_inputs.pop(request, None)
            self.off_fast_path.pop(request, None)
        del plan.requests[indexes], plan.num_scheduled_tokens[indexes]
        del plan.num_computed_tokens[indexes]
