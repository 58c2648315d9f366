"""Types of a step: its plan, which lists the tokens and blocks of each request, and its output."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

from services.common.pool.ids import BlockId
from services.common.pool.operations import BlockCopy, BlockTables
from services.common.request.finish import FinishReason
from services.scheduler.core.kv_transfer import (
    NO_RESULTS,
    KVConnectorMetadata,
    KVLoad,
    KVTransferResults,
)
from services.scheduler.core.request import Request, TurnEnd


class WaitReason(Enum):
    """Why a waiting request was not admitted in a step. Most reasons stop admission, so all
    requests behind wait for the same reason. A reason in `OWN_REASONS` concerns a single request.
    Such a request is passed over (skipped), and requests behind it may be admitted.
    """

    BUDGET = "budget"
    """The step's token budget was used up, or is too small for a prompt that must not be chunked.
    """
    MAX_SEQS = "max_seqs"
    """The largest number of requests that may run at once (`max_running`) is running."""
    NO_BLOCKS = "no_blocks"
    """Too few blocks are free for the request, or a running request was preempted in the step."""
    RETAINED = "retained"
    """Too many of the blocks that the request needs belong to paused contexts of more worth."""
    HEADROOM = "headroom"
    """There are enough blocks, but the policy leaves some free beside running requests."""
    PREFILL_INTERVAL = "prefill_interval"
    """Requests decode, and the last step with prompts was too recent for another one."""
    HELD_BACK = "held_back"
    """The request is held back during the search for a request whose steps always fail."""
    PAUSED = "paused"
    """An operator paused the engine. Steps, planned only with mode WAIT, have this reason."""
    RECOVERY = "recovery"
    """Pool or workers are lost. No step has this reason, because none is planned."""
    ADAPTERS = "adapters"
    """The adapter is not loaded, or running requests use `max_loras` other adapters."""
    SESSION = "session"
    """The request is a session and waits for its next input."""
    REMOTE_KV = "remote_kv"
    """The request's keys and values are being loaded, or the connector must answer first."""
    GRAMMAR = "grammar"
    """The grammar that the output must follow is not compiled yet."""
    ENCODER = "encoder"
    """The encoder has no budget or cache space in the step for the next item of the prompt."""
    OUTPUT_IN_FLIGHT = "output_in_flight"
    """The request was preempted while a step was in flight, whose token has not arrived yet."""


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
"""Reasons for which a single request is passed over."""


def preparation_wait(request: Request) -> WaitReason:
    """The wait reason of a request whose adapter is being loaded or whose grammar compiles."""
    return WaitReason.ADAPTERS if request.awaits_adapter else WaitReason.GRAMMAR


class PreemptionCause(Enum):
    """Why running requests returned to the queue."""

    NO_BLOCKS = "no_blocks"
    """Another request needed the blocks."""
    RESET = "reset"
    """An operator reset the prefix cache."""
    FAULT_SEARCH = "fault_search"
    """A search for a request whose steps always fail, during which only few requests may run."""
    POOL_LOST = "pool_lost"
    """The pool ended or did not answer."""
    WORKERS_LOST = "workers_lost"
    """A worker ended or did not answer."""


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Request
    cause: Request
    """The request that needed the blocks. Equals `victim` if the policy chose the request itself.
    """
    num_lost_tokens: int
    """Number of tokens of the victim that must be computed again."""


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one engine step. The first three lists are parallel, in scheduling order."""

    step: int
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each request that are computed before the step, prefix hit included."""
    block_tables: dict[Request, BlockTables] = field(default_factory=dict)
    """Maps requests that are admitted in this step to their full block tables."""
    appended_blocks: dict[Request, BlockTables] = field(default_factory=dict)
    """Maps requests that were running before the step to their new blocks."""
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    """Maps a request to the draft tokens that the step verifies, its last scheduled tokens."""
    prefill_chunks: frozenset[Request] = frozenset()
    """Requests whose known tokens are not all computed after the step. None gets a token."""
    new: list[Request] = field(default_factory=list)
    """Requests that are admitted for the first time."""
    resumed: list[Request] = field(default_factory=list)
    """Requests that are admitted again after a preemption."""
    preemptions: list[Preemption] = field(default_factory=list)
    """The preemptions of the step, in the order in which they happened."""
    wait_reason: WaitReason | None = None
    """Why the first request that still waits and was not passed over was not admitted. If all
    waiting requests were passed over, the reason of the first one. None if no request waits.
    """
    retained: str = ""
    """If the wait reason is RETAINED: which context is kept, and why, for people."""
    encoder_inputs: dict[Request, list[int]] = field(default_factory=dict)
    """Maps a request to the indexes of its prompt items (such as images) to be encoded."""
    evicted_encoder_inputs: Sequence[str] = ()
    """Identifiers of items whose embeddings the workers delete before the step."""
    passed_over: dict[Request, WaitReason] = field(default_factory=dict)
    """Requests that were passed over in the step, each with its reason."""
    removed_rows: Sequence[int] = ()
    """Rows of the workers' batch that were freed since the last plan."""
    block_ids_to_zero: Sequence[BlockId] = ()
    """Blocks that the workers zero before the step."""
    copies: Sequence[BlockCopy] = ()
    """Blocks that the workers copy before the step, in order."""
    loads: Sequence[KVLoad] = ()
    """Loads of the connector that begin with this step."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """The message of the connector's scheduler side to its worker side."""
    awaits_transfers: bool = False
    """Whether a transfer is in progress whose end the step's output may report."""
    dropped: AbstractSet[Request] = frozenset()
    """Requests whose output of this step is discarded."""

    num_tokens: int = 0
    """Number of tokens that the step computes for all requests."""

    @property
    def is_sent(self) -> bool:
        """Whether workers get the step: it has tokens, freed rows, items to delete, a message or
        transfers.
        """
        return bool(
            self.requests
            or self.removed_rows
            or self.evicted_encoder_inputs
            or self.kv_connector_metadata
            or self.awaits_transfers
        )

    @property
    def is_special(self) -> bool:
        """Whether workers do more in the step than compute its tokens, or discard a token."""
        has_work = self.copies or self.block_ids_to_zero or self.loads or self.encoder_inputs
        return bool(has_work or self.draft_token_ids or self.dropped or self.preemptions)

    @property
    def preempted(self) -> list[Request]:
        """The preempted requests, in the order of preemption."""
        return [preemption.victim for preemption in self.preemptions]


@dataclass(slots=True)  # not frozen: creation in each step would take three times as long
class ModelRunnerOutput:
    """The workers' output of a step. `token_ids` is parallel to the plan's requests."""

    token_ids: Sequence[Sequence[int]]
    """Sampled tokens of each request. Empty while a prompt is not complete."""
    draft_token_ids: Sequence[Sequence[int]] = ()
    """Drafts of each request for the next step. Empty if the workers propose none."""
    num_draft_tokens: Sequence[int] = ()
    """Number of drafts of each request that the workers verified. Empty if there were none."""
    logprobs: Mapping[int, object] = field(default_factory=dict)
    """Maps the index of a request to its log-probabilities. The scheduler does not read them."""
    nan_requests: frozenset[int] = frozenset()
    """Indexes of requests whose logits contain NaN."""
    refused_tokens: Mapping[int, int] = field(default_factory=dict)
    """Maps the index of a request to the first token that the request's grammar refuses, as a
    position among its sampled tokens. If the refused token is not in the output, the position is
    the number of sampled tokens.
    """
    grammar_errors: Mapping[int, str] = field(default_factory=dict)
    """Maps the index of a request with a refused token to the reason if its grammar failed."""
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Maps the index of a request to the vector of its prompt, which is not read here."""
    execute_nanos: int = 0
    """Compute time of the workers, in nanoseconds; 0 if not measured."""
    slack_seconds: float | None = None
    """Seconds from when the step was ready to run until the end of the previous step. Negative if
    the step was ready only after that end. None if not measured.
    """
    kv_transfers: KVTransferResults = NO_RESULTS
    """Results of transfers, from the connector's worker side."""


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """New tokens of one request, or its end."""

    request: Request
    token_ids: Sequence[int]


@dataclass(slots=True)  # see ModelRunnerOutput
class EngineCoreOutputs:
    """The tokens that a step appended, and the requests that it ended, in scheduling order."""

    plan: SchedulerOutput
    token_ids: Sequence[Sequence[int] | None]
    """New tokens, parallel to the plan's requests. None for requests that had already ended."""
    logprobs: Mapping[int, object]
    ended: Sequence[Request]
    """Requests that ended with the step. At the end of the list are requests that need not be part
    of the step, because their load failed or because they ended in the queue.
    """
    num_tokens: int
    turns: Mapping[Request, TurnEnd] = field(default_factory=dict)
    """Maps sessions to the end of their turn, if the step ended it."""
    execute_nanos: int = 0
    """Compute time of the workers, in nanoseconds; 0 if not measured."""
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Maps the index of a request, even if it had ended, to the vector of its prompt."""
    failed: Sequence[Request] = ()
    """The requests in `ended` that ended because they can never run."""
    num_draft_tokens: Sequence[int] = ()
    """Number of verified drafts, parallel to the plan's requests. Empty if there were none."""

    @property
    def num_accepted(self) -> list[int]:
        """Number of accepted drafts of each request that had drafts."""
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
