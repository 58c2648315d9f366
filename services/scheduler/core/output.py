"""What a step is: who gets how many tokens, with which blocks; and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.common.ids import BlockId
from services.common.pool_operations import BlockTables
from services.scheduler.core.request import Request


class WaitReason(Enum):
    """Why the head of the queue, and so everyone behind it, was not admitted in a step: nobody who
    waits gives way to others.
    """

    BUDGET = "budget"
    """The step's tokens were used up, or the whole prompt must fit and does not."""
    MAX_SEQS = "max_seqs"
    """As many requests run as may."""
    NO_BLOCKS = "no_blocks"
    """It does not fit in the pool, or somebody who ran had just to give way."""
    HELD_BACK = "held_back"
    """A request is searched for whose steps always fail: few run at a time until it is found."""
    PAUSED = "paused"
    """An operator let no step be planned; no step that was planned has this for a reason."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """One request gave way."""

    victim: Request
    cause: Request
    """Who needed the blocks; the victim itself, where there was nobody less important."""
    num_lost_tokens: int
    """Tokens of the victim that must be computed again."""


@dataclass(slots=True)
class SchedulerOutput:
    """One engine step, decided. The first three lists are parallel, in scheduling order."""

    step: int
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Where each one starts, prefix hit included."""
    block_tables: dict[Request, BlockTables] = field(default_factory=dict)
    """Full tables of those admitted in this step."""
    appended_blocks: dict[Request, BlockTables] = field(default_factory=dict)
    """New blocks of those that ran before."""
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    """Drafts at the end of a request's scheduled tokens, to be verified."""
    new: list[Request] = field(default_factory=list)
    """Admitted for the first time."""
    resumed: list[Request] = field(default_factory=list)
    """Admitted again after a preemption."""
    preemptions: list[Preemption] = field(default_factory=list)
    """In the order in which they happened."""
    wait_reason: WaitReason | None = None
    """Why each request that still waits was not scheduled; None when nobody waits."""
    removed_rows: list[int] = field(default_factory=list)
    """Rows of the workers' batch that were freed since the last plan."""
    block_ids_to_zero: list[BlockId] = field(default_factory=list)
    """Blocks that the workers clear before the step."""

    @property
    def preempted(self) -> list[Request]:
        """Who gave way, in that order."""
        return [preemption.victim for preemption in self.preemptions]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the workers answered. `token_ids` is parallel to the plan's requests."""

    token_ids: Sequence[Sequence[int]]
    """Sampled tokens: none inside a prompt."""
    draft_token_ids: Sequence[Sequence[int]] = ()
    """Proposals for the next step; parallel as well, or empty when nothing is proposed."""
    logprobs: Mapping[int, object] = field(default_factory=dict)
    """By index of the request, carried through."""
    nan_requests: frozenset[int] = frozenset()
    """Indexes of requests whose logits held NaN."""


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """News of one request."""

    request: Request
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """News of a step. Iterates over the requests that have some, in scheduling order."""

    plan: SchedulerOutput
    token_ids: Sequence[Sequence[int] | None]
    """New tokens, parallel to the plan's requests; None for those that had ended before."""
    logprobs: Mapping[int, object]
    ended: Sequence[Request]
    """Requests that the step brought to their end."""

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        ended = set(self.ended)
        for index, (request, tokens) in enumerate(
            zip(self.plan.requests, self.token_ids, strict=True)
        ):
            if tokens or (tokens is not None and (index in self.logprobs or request in ended)):
                yield EngineCoreOutput(request, tokens)
