"""The state of a step while it is planned, and the list of the steps in flight."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.computed_tokens import num_computed_tokens_of
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import SchedulerOutput, WaitReason, preparation_wait
from services.scheduler.core.planning.step_encoder import StepEncoder
from services.scheduler.core.request import Request, RequestStatus


class PlannedSteps:
    """Counts planned steps, and lists the steps in flight (without output yet), oldest first."""

    def __init__(self) -> None:
        self.in_flight: list[SchedulerOutput] = []
        self.next_number = 0
        self.last_updated = -1
        """Number of the last step whose output was applied."""

    def add(self, plan: SchedulerOutput) -> None:
        """Counts a planned step, which is in flight from now on if it computes tokens."""
        self.next_number += 1
        if plan.requests:
            self.in_flight.append(plan)

    def updated(self, plan: SchedulerOutput) -> None:
        """Records that the outputs of this step and of all earlier steps were applied."""
        self.last_updated = plan.step
        while self.in_flight and self.in_flight[0].step <= plan.step:
            del self.in_flight[0]

    def skip(self, num_steps: int) -> None:
        """Counts `num_steps` further steps as planned, and their outputs as applied."""
        self.next_number += num_steps
        self.last_updated += num_steps

    def forget(self) -> None:
        """Removes the steps in flight, because their outputs will not arrive."""
        self.in_flight = []
        self.last_updated = self.next_number - 1

    def drop(self, requests: Collection[Request]) -> None:
        """Makes the steps in flight discard the tokens that they sample for these requests."""
        for plan in self.in_flight:
            plan.dropped |= set(plan.requests).intersection(requests)

    def drops(self, request: Request) -> bool:
        """Whether a step in flight samples tokens of the request that will be discarded."""
        return any(request in plan.dropped for plan in self.in_flight)

    def last_awaited(self, request: Request) -> int | None:
        """Number of the last step in flight whose tokens of a request will be kept, or None."""
        awaited = (one for one in reversed(self.in_flight) if request not in one.dropped)
        return next((plan.step for plan in awaited if request in plan.requests), None)

    def num_tokens(self) -> Callable[[Request], int]:
        """Returns a function from a request to its number of tokens in the steps in flight."""
        steps = [
            dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True))
            for plan in self.in_flight
        ]
        return lambda request: sum(step.get(request, 0) for step in steps)


@dataclass(slots=True)
class WaitingPrefixes:
    """Results of looking up the prefixes of waiting requests in the pool and in a KV connector."""

    hits: dict[Request, int] = field(default_factory=dict)
    """Maps a request to its number of cached tokens, from its latest lookup."""
    external: dict[Request, int] = field(default_factory=dict)
    """Maps a request to the number of tokens after its hit that the KV connector loads."""
    divergent_hits: dict[Request, int] = field(default_factory=dict)
    """Maps a request to its number of tokens that full-attention layers have cached, even if other
    layers have not. Empty if `config.hits_may_diverge` is false.
    """
    diverging: set[Request] = field(default_factory=set)
    """Requests whose entry in `hits` counts tokens that only full-attention layers have cached."""
    num_stored: dict[Request, int] = field(default_factory=dict)
    """Maps a session (a request with several turns) to its number of tokens whose keys and values
    are stored, if steps of its last turn are in flight. Fewer tokens are stored than computed.
    Sliding windows advance only past stored tokens.
    """
    published: set[BlockHash] = field(default_factory=set)
    """Hashes of blocks that this step's admissions publish (cache), so that later ones hit them."""

    _cut_hits: dict[Request, int] = field(default_factory=dict)

    def note_hit(self, request: Request, num_tokens: int, shared_prefix_boundary: int) -> None:
        self.hits[request] = num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary

    def cut_hit(self, request: Request, num_tokens: int) -> None:
        """Sets a request's hit to `num_tokens` tokens (whole blocks). The KV connector loads the
        tokens after these, and the states of state-space layers.
        """
        self.hits[request] = num_tokens
        self.diverging.add(request)
        self._cut_hits[request] = num_tokens

    def max_hit_tokens(self, request: Request) -> int:
        """The longest hit, in tokens, that a request may use."""
        return self._cut_hits.get(request, request.max_hit_tokens)

    def forget_hits(self) -> None:
        """Removes all hits, because an admission may have changed them."""
        self.hits.clear()
        self._cut_hits.clear()
        self.divergent_hits.clear()
        self.diverging.clear()


class PassingOver:
    """Decides which waiting requests a step skips (passes over).

    A request is skipped if it cannot be admitted in this step for a reason of its own, such as an
    adapter that is not loaded. It keeps its position in the queue, and requests behind it may be
    admitted. At a request that lacks blocks or budget, admission stops instead, because requests
    behind it would use up the blocks or the budget.
    """

    def __init__(
        self, max_loras: int | None, running: Iterable[Request], last_updated_step: int
    ) -> None:
        self._max_loras = max_loras
        self._last_updated_step = last_updated_step
        self._adapters: set[bytes] = set()
        """Digests of the adapters of all running requests."""
        if max_loras is not None:
            self._adapters = {request.adapter_digest for request in running} - {b""}

    def copy(self) -> "PassingOver":
        """A copy for planning admissions that may not succeed."""
        if self._max_loras is None:
            return self
        copy = PassingOver(self._max_loras, (), self._last_updated_step)
        copy._adapters = set(self._adapters)
        return copy

    def reason(self, request: Request) -> WaitReason | None:
        """Why a request is skipped. None if it may be admitted."""
        if request.status is RequestStatus.WAITING_FOR_CHUNK:
            return WaitReason.SESSION
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return WaitReason.REMOTE_KV
        if request.grammar is not None and request.grammar is not GrammarStatus.READY:
            return preparation_wait(request)
        if request.awaited_step is not None and request.awaited_step > self._last_updated_step:
            return WaitReason.OUTPUT_IN_FLIGHT
        adapter = request.adapter_digest
        if not adapter or self._max_loras is None or adapter in self._adapters:
            return None
        return WaitReason.ADAPTERS if len(self._adapters) >= self._max_loras else None

    def admit(self, request: Request) -> None:
        if self._max_loras is not None and request.adapter_digest:
            self._adapters.add(request.adapter_digest)


@dataclass  # without slots: cached properties are stored in the instance
class StepBuilder:
    """A step while it is planned. Only `plan` is kept when planning is complete."""

    plan: SchedulerOutput
    token_budget: int
    long_prefill_token_threshold: int
    """Limit on the tokens of one request in this step. 0 means that there is no limit."""
    make_passing_over: Callable[[], PassingOver]
    make_encoder: Callable[[], StepEncoder]
    defers_prefills: bool = False
    """Whether the step schedules no prompts, so that they wait for a later step."""
    off_fast_path: dict[Request, int] = field(default_factory=dict)
    """Maps scheduled requests that are not on the fast path (see `RunningRequests`) to their number
    of computed tokens after the step.
    """
    failed: dict[Request, str] = field(default_factory=dict)
    """Maps requests that can never be admitted to their errors."""

    @cached_property
    def prefixes(self) -> WaitingPrefixes:
        return WaitingPrefixes()

    @cached_property
    def passing_over(self) -> PassingOver:
        return self.make_passing_over()

    @cached_property
    def encoder(self) -> StepEncoder:
        """Decides which prompt items (such as images) the encoder computes in the step."""
        return self.make_encoder()

    def cap(self, num_tokens: int) -> int:
        threshold = self.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    def schedule_one_token_each(self, requests: Sequence[Request]) -> None:
        plan = self.plan
        plan.requests += requests
        plan.num_scheduled_tokens += [1] * len(requests)
        plan.num_computed_tokens += num_computed_tokens_of(requests)
        self.token_budget -= len(requests)

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Schedules `num_tokens` tokens of a request off the fast path, drafts included."""
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
        """Removes a running request, and all requests that were examined after it, from the step.
        Returns the number of tokens that were scheduled for the request.
        """
        index = self.plan.requests.index(request)
        num_tokens = self.plan.num_scheduled_tokens[index]
        self._unschedule(slice(index, None))
        number = request.admission_number
        failed = self.failed.items()
        self.failed = {one: why for one, why in failed if one.admission_number < number}
        self.encoder.take_back_from(request)
        return num_tokens

    def unschedule(self, request: Request) -> None:
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
