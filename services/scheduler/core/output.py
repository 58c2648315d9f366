"""The plan of a step, with the tokens and blocks of each request, and the output of a step."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

from services.common.pool.ids import BlockId
from services.common.pool.operations import BlockCopy, BlockTables
from services.common.request.finish_reason import FinishReason
from services.scheduler.core.request import Request, TurnEnd
from services.scheduler.core.transfers.kv_connector import (
    NO_RESULTS,
    KVConnectorMetadata,
    KVLoad,
    KVTransferResults,
)


class WaitReason(Enum):
    """Why a waiting request was not admitted in a step.

    Most reasons concern the first request that is ready, and therefore those behind it as well.
    Those of `OWN_REASONS` concern single requests: they are passed over, and others overtake them.
    """

    BUDGET = "budget"
    """The step's tokens were used up, or the whole prompt must fit and does not."""
    MAX_SEQS = "max_seqs"
    """`max_running` requests run."""
    NO_BLOCKS = "no_blocks"
    """It does not fit in the pool, or a running request was preempted in the step."""
    PREFILL_INTERVAL = "prefill_interval"
    """Requests decode, and the last step with prompts is too recent."""
    HELD_BACK = "held_back"
    """It is held back during the search for a request whose steps always fail."""
    PAUSED = "paused"
    """An operator paused the engine. Steps have it only in a pause that waits for running requests;
    in others none is planned.
    """
    RECOVERY = "recovery"
    """Pool or workers are away. No step has it, since none is planned."""
    ADAPTERS = "adapters"
    """Running requests use as many adapters as may be used at once, and its own is not among them;
    or the workers have yet to load it.
    """
    SESSION = "session"
    """It is a session, and waits for its next input."""
    REMOTE_KV = "remote_kv"
    """Its keys and values are being loaded, or it is not known yet which can be."""
    GRAMMAR = "grammar"
    """The grammar that its output must follow is not compiled yet."""
    ENCODER = "encoder"
    """The encoder has no budget or room in the step for an item at which it would go on."""
    OUTPUT_IN_FLIGHT = "output_in_flight"
    """A step that was in flight when it was preempted has yet to give it a token."""


OWN_REASONS = frozenset(
    {
        WaitReason.ADAPTERS,
        WaitReason.SESSION,
        WaitReason.REMOTE_KV,
        WaitReason.GRAMMAR,
        WaitReason.ENCODER,
        WaitReason.OUTPUT_IN_FLIGHT,
    }
)
"""Reasons of single requests, which others overtake."""


def preparation_wait(request: Request) -> WaitReason:
    """The wait reason of a request for which the workers load an adapter or compile a grammar."""
    return WaitReason.ADAPTERS if request.awaits_adapter else WaitReason.GRAMMAR


class PreemptionCause(Enum):
    """Why requests that ran went back to the queue."""

    NO_BLOCKS = "no_blocks"
    """Another request needed its blocks."""
    RESET = "reset"
    """An operator had every cached prefix forgotten."""
    FAULT_SEARCH = "fault_search"
    """Few run at a time during the search for a request whose steps always fail."""
    POOL_LOST = "pool_lost"
    """The pool ended or did not answer."""
    WORKERS_LOST = "workers_lost"
    """A worker ended or did not answer."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """One request was preempted."""

    victim: Request
    cause: Request
    """The request that needed the blocks; the victim itself if it was the last by the policy."""
    num_lost_tokens: int
    """Tokens of the victim that must be computed again."""


@dataclass(slots=True)
class SchedulerOutput:
    """One engine step, decided. The first three lists are parallel, in scheduling order."""

    step: int
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Tokens of each that are computed before the step, prefix hit included."""
    block_tables: dict[Request, BlockTables] = field(default_factory=dict)
    """Full block tables of requests that are admitted in this step."""
    appended_blocks: dict[Request, BlockTables] = field(default_factory=dict)
    """New blocks of requests that ran before."""
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    """Drafts at the end of a request's scheduled tokens, to be verified."""
    prefill_chunks: frozenset[Request] = frozenset()
    """Requests of which tokens are left to compute before one can be sampled."""
    new: list[Request] = field(default_factory=list)
    """Admitted for the first time."""
    resumed: list[Request] = field(default_factory=list)
    """Admitted again after a preemption."""
    preemptions: list[Preemption] = field(default_factory=list)
    """In the order in which they happened."""
    wait_reason: WaitReason | None = None
    """Why the requests that still wait were not admitted; None if no request waits. If all of them
    were passed over, the reason of the first.
    """
    encoder_inputs: dict[Request, list[int]] = field(default_factory=dict)
    """Items of prompts that the encoder computes, by index in their request."""
    evicted_encoder_inputs: Sequence[str] = ()
    """Identifiers of items whose embeddings the workers forget before the step."""
    passed_over: dict[Request, WaitReason] = field(default_factory=dict)
    """Requests that others may overtake, each with a reason of its own."""
    removed_rows: Sequence[int] = ()
    """Rows of the workers' batch that were freed since the last plan."""
    block_ids_to_zero: Sequence[BlockId] = ()
    """Blocks that the workers clear before the step."""
    copies: Sequence[BlockCopy] = ()
    """Blocks that they copy then, in order."""
    loads: Sequence[KVLoad] = ()
    """Loads of the connector that begin with this step."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """The connector's message to its workers' side."""
    awaits_transfers: bool = False
    """Whether a transfer is under way whose end the step's output may report."""
    dropped: AbstractSet[Request] = frozenset()
    """Requests whose output of this step is discarded."""

    num_tokens: int = 0
    """Tokens that the step computes, of all requests."""

    @property
    def is_sent(self) -> bool:
        """Whether the step is sent to the workers: it computes something, frees rows, carries a
        connector's message, or awaits transfers.
        """
        has_message = self.removed_rows or self.kv_connector_metadata or self.awaits_transfers
        return bool(self.requests or has_message)

    @property
    def preempted(self) -> list[Request]:
        """The requests that were preempted, in that order."""
        return [preemption.victim for preemption in self.preemptions]


@dataclass(slots=True)  # not frozen, as it is made in each step: that would take thrice the time
class ModelRunnerOutput:
    """The workers' output of a step. `token_ids` is parallel to the plan's requests."""

    token_ids: Sequence[Sequence[int]]
    """Sampled tokens: none inside a prompt."""
    draft_token_ids: Sequence[Sequence[int]] = ()
    """Drafts for the next step; parallel as well, or empty if the workers propose none."""
    num_draft_tokens: Sequence[int] = ()
    """Drafts that the workers verified of each; parallel as well, or empty if there were none."""
    logprobs: Mapping[int, object] = field(default_factory=dict)
    """Log-probabilities by index of the request; carried through."""
    nan_requests: frozenset[int] = frozenset()
    """Indexes of requests whose logits held NaN."""
    refused_tokens: Mapping[int, int] = field(default_factory=dict)
    """The first of its tokens that its grammar refuses, by index of the request; the number of its
    tokens where the refused one is not among them.
    """
    grammar_errors: Mapping[int, str] = field(default_factory=dict)
    """Why the grammar failed, by index of the request, of requests with a refused token."""
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Vectors of prompts that the step computed to their end, by index of the request; carried
    through.
    """
    execute_nanos: int = 0
    """For how long the workers computed; 0 where that is not measured."""
    slack_seconds: float | None = None
    """Time from when the step was ready to run to the end of the step before it; less than 0 if
    it was ready after that. None where that is not measured.
    """
    kv_transfers: KVTransferResults = NO_RESULTS
    """Results of the connector's workers' side."""


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """New tokens of one request, or its end."""

    request: Request
    token_ids: Sequence[int]


@dataclass(slots=True)  # see ModelRunnerOutput
class EngineCoreOutputs:
    """New tokens and ends of a step. Iterates over the requests with any, in scheduling order."""

    plan: SchedulerOutput
    token_ids: Sequence[Sequence[int] | None]
    """New tokens, parallel to the plan's requests; None for requests that had ended before."""
    logprobs: Mapping[int, object]
    ended: Sequence[Request]
    """Requests that ended by the step; those whose load failed, and those that ended in the queue,
    last, though they may have no part in it.
    """
    num_tokens: int
    """New tokens of all requests."""
    turns: Mapping[Request, TurnEnd] = field(default_factory=dict)
    """Sessions with a turn that the step ended."""
    execute_nanos: int = 0
    """For how long the workers computed; 0 where that is not measured."""
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Vectors of prompts, by index of the request, also of requests that had ended before."""
    failed: Sequence[Request] = ()
    """The part of `ended` that steps looked at and that can never run on."""
    num_draft_tokens: Sequence[int] = ()
    """Drafts that were verified, parallel to the plan's requests; empty if there were none."""

    @property
    def num_accepted(self) -> list[int]:
        """Drafts that stand, of each request of which some were verified."""
        counts = zip(self.num_draft_tokens, self.token_ids, strict=True)
        return [max(len(tokens or ()) - 1, 0) for num_drafts, tokens in counts if num_drafts]

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        ended = {*self.ended, *self.turns}.difference(self.failed)
        for index, (request, tokens) in enumerate(
            zip(self.plan.requests, self.token_ids, strict=True)
        ):
            if tokens or (tokens is not None and (index in self.logprobs or request in ended)):
                yield EngineCoreOutput(request, tokens)
        for request in self.ended:
            if request.finish_reason is FinishReason.KV_LOAD_FAILED:
                yield EngineCoreOutput(request, ())
        for request in self.failed:
            yield EngineCoreOutput(request, ())
