"""Decides which items of prompts (such as images) the encoder computes in a step. A prompt chunk
ends before the first item that the encoder cannot compute in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.planning.encoder_cache_manager import EncoderCacheManager
from services.scheduler.core.request import Request


@dataclass(slots=True)
class EncoderDecision:
    """Which tokens and items of a request a step computes."""

    num_tokens: int
    """Number of tokens that the step computes, at most `num_asked`."""
    budget: int
    """The encoder's remaining budget after computing `inputs`, in embeddings."""
    num_asked: int
    """Number of tokens that the step would compute if the encoder had no limits."""
    inputs: list[int] = field(default_factory=list)
    """Indexes of the items that the encoder computes."""
    repeated: list[int] = field(default_factory=list)
    """Indexes of items that equal an earlier item in `inputs` and share its output."""
    mismatch: str = ""
    """Identifier of an item whose size differs from its cached output's size. Empty if none."""


@dataclass(slots=True)
class StepEncoder:
    """The encoder's remaining budget in a step, and the cache of encoder outputs."""

    config: SchedulerConfig
    cache: EncoderCacheManager
    budget: int
    """Number of embeddings that the encoder can still compute in this step."""
    decisions: dict[Request, EncoderDecision] = field(default_factory=dict)
    """Decisions for running requests with items, in the order in which they were made."""
    kept: dict[Request, EncoderDecision] = field(default_factory=dict)
    """Decisions for requests that lacked blocks. Planning uses them again after a preemption."""
    _marks: list[tuple[Request, int, EncoderCacheManager]] = field(default_factory=list)
    """The request, and the budget and the cache before the decision, for each decision in order."""

    def copy(self) -> "StepEncoder":
        """A copy of the budget and the cache, for planning admissions that may not succeed."""
        return StepEncoder(self.config, self.cache.copy(), self.budget)

    def decide(self, request: Request, start: int, num_tokens: int) -> EncoderDecision:
        """Decides which items the encoder must compute for the `num_tokens` tokens from position
        `start` on: the items that overlap these tokens and have no cached output. Marks cached
        outputs of overlapping items as used. Evicts unused outputs if the cache lacks space.
        """
        decision, end = EncoderDecision(num_tokens, self.budget, num_tokens), start + num_tokens
        sizes: dict[str, int] = {}
        for index, item in enumerate(request.encoder_inputs):
            if item.end <= start:
                continue
            if item.offset >= end:
                break
            splits = item.offset >= start and item.end > start + decision.num_tokens
            if splits and self.config.disable_chunked_mm_input:
                decision.num_tokens = max(0, item.offset - start)
                break
            size = sizes.get(item.identifier, self.cache.num_cached_embeds(item.identifier))
            if size is not None and size != item.num_embeds:
                return EncoderDecision(0, self.budget, num_tokens, mismatch=item.identifier)
            if item.identifier in sizes:
                decision.repeated.append(index)
                continue
            if self.cache.use_cached(request, index):
                continue
            if item.num_embeds > decision.budget or not self.cache.make_room(
                sum(sizes.values()) + item.num_embeds
            ):
                decision.num_tokens = min(decision.num_tokens, max(0, item.offset - start))
                break
            if item.has_embeds_between(start, end):
                decision.inputs.append(index)
                decision.budget -= item.num_embeds
                sizes[item.identifier] = item.num_embeds
        return decision

    def allocate(self, request: Request, decision: EncoderDecision) -> None:
        if decision.inputs:
            self.budget = decision.budget
        for index in decision.inputs:
            self.cache.allocate(request, index)
        for index in decision.repeated:
            self.cache.use_cached(request, index)

    def admit(self, request: Request, start: int, num_tokens: int) -> list[int]:
        """Like `schedule`, for an admitted request. Returns the indexes of the items to compute."""
        decision = self.decide(request, start, num_tokens)
        self.allocate(request, decision)
        return decision.inputs

    def schedule(self, request: Request, num_computed: int, num_tokens: int) -> EncoderDecision:
        """Decides on a running request's items. Reserves budget and cache space for them."""
        decision = self.kept.get(request)
        if decision is None:
            self._mark(request)
            decision = self.decide(request, num_computed, num_tokens)
        self.decisions[request] = decision
        if decision.num_tokens:
            self.allocate(request, decision)
        return decision

    def take_back_from(self, request: Request) -> None:
        """Undoes the decisions for `request`, which lacks blocks, and for all running requests that
        were admitted after it. Outputs that were evicted for `request` stay evicted.
        """
        number = request.admission_number
        later = [mark for mark in self._marks if mark[0].admission_number >= number]
        if later:
            _, self.budget, earlier = later[0]
            self.cache.restore(earlier)
            del self._marks[len(self._marks) - len(later) :]
        if request in self.decisions and request not in self.kept:
            num_asked = self.decisions[request].num_asked
            self.decide(request, request.num_computed_tokens, num_asked)

    def keep(self, request: Request) -> None:
        """Keeps the decision for a request that lacks blocks, while another one is preempted."""
        if request in self.decisions:
            self.kept[request] = self.decisions[request]
            self._mark(request)

    def refuse(self, request: Request, start: int, num_tokens: int) -> None:
        """Evicts outputs as if a request that lacks blocks were admitted, as in vLLM. Then frees
        the outputs that the request uses: a session may still use outputs of its last turn.
        """
        if start < request.num_encoded_tokens:
            self.decide(request, start, num_tokens)
        self.cache.free(request)

    def give_back(self, request: Request, inputs: Sequence[int]) -> None:
        """Adds the embeddings of a preempted request's items to the budget again."""
        self.budget += sum(request.encoder_inputs[index].num_embeds for index in inputs)

    def _mark(self, request: Request) -> None:
        self._marks.append((request, self.budget, self.cache.copy()))


def mismatch_error(identifier: str) -> str:
    return (
        f"the multimodal item {identifier!r} has another size than the cached item with the same "
        "identifier"
    )
