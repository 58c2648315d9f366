"""The state of a step while it is planned: its remaining budget and the tokens scheduled so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.computed_tokens import num_computed_tokens_of
from services.scheduler.core.planning.passing_over import PassingOver
from services.scheduler.core.planning.step_encoder import StepEncoder
from services.scheduler.core.planning.waiting_prefixes import WaitingPrefixes
from services.scheduler.core.request import Request


@dataclass(slots=True)
class StepBuilder:
    """The decisions of a step so far. `plan` is the result. The other attributes are state on which
    later decisions depend.
    """

    plan: SchedulerOutput
    token_budget: int
    """Number of tokens left in the step's budget."""
    long_prefill_token_threshold: int
    """Limit on the tokens of one request in this step. 0 means that there is no limit."""
    make_passing_over: Callable[[], PassingOver]
    make_encoder: Callable[[], StepEncoder]
    defers_prefills: bool = False
    """Whether no prompt is scheduled in this step, so that all prompts wait for a later step."""
    off_fast_path: dict[Request, int] = field(default_factory=dict)
    """The scheduled requests that were examined one by one, each with its number of computed tokens
    after the step. Requests on the fast path are scheduled without being examined.
    """
    failed: dict[Request, str] = field(default_factory=dict)
    """Requests that can never run, each with its error."""

    _prefixes: WaitingPrefixes | None = None
    _passing_over: PassingOver | None = None
    _encoder: StepEncoder | None = None

    @property
    def prefixes(self) -> WaitingPrefixes:
        """Prefix hits of the waiting requests."""
        if self._prefixes is None:
            self._prefixes = WaitingPrefixes()
        return self._prefixes

    @property
    def passing_over(self) -> PassingOver:
        """Decides which waiting requests are passed over (skipped), given the admissions so far."""
        if self._passing_over is None:
            self._passing_over = self.make_passing_over()
        return self._passing_over

    @property
    def encoder(self) -> StepEncoder:
        """The budget of the encoder of prompt items in this step, and its decisions."""
        if self._encoder is None:
            self._encoder = self.make_encoder()
        return self._encoder

    @property
    def has_running_requests(self) -> bool:
        """Whether a request that ran before this step is scheduled."""
        return len(self.plan.requests) > len(self.plan.block_tables)

    @property
    def has_prefill_chunks(self) -> bool:
        """Whether a request that ran before this step computes a further chunk of its prompt."""
        return any(request.is_prefill_chunk for request in self.off_fast_path)

    def cap(self, num_tokens: int) -> int:
        """Returns `num_tokens`, limited by `long_prefill_token_threshold`."""
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
        """Schedules tokens of a request that is not on the fast path. If the request has drafts,
        they are the last of these tokens.
        """
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
        """Removes a request, and all requests that were scheduled after it, from the step. Returns
        the number of tokens that were scheduled for the request.
        """
        index = self.plan.requests.index(request)
        num_tokens = self.plan.num_scheduled_tokens[index]
        self._unschedule(slice(index, None))
        return num_tokens

    def unschedule(self, request: Request) -> None:
        """Removes a request from the step, if it was scheduled."""
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
