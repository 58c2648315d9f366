"""The plan of an engine step (its requests, tokens and blocks), and the output of the step."""

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
    """Why a step did not admit a waiting request. A reason in `OWN_REASONS` concerns one request:
    the step skips (passes over) it, and may admit requests behind it. Most other reasons end
    admission in the step, and apply to all requests behind the first one.
    """

    BUDGET = "budget"
    """The step's remaining token budget is 0, or too small for a prompt that must not be chunked.
    """
    MAX_SEQS = "max_seqs"
    """As many requests run as `SchedulerConfig.max_running` allows."""
    NO_BLOCKS = "no_blocks"
    """Too few blocks are free for the request, or a running request was preempted in the step."""
    RETAINED = "retained"
    """The request needs KV blocks of contexts (kept for the next request of an agent's run) that
    the policy values more than the request.
    """
    HEADROOM = "headroom"
    """Enough blocks are free, but the policy reserves some of them for running requests."""
    PREFILL_INTERVAL = "prefill_interval"
    """Requests decode, and the last step that computed prompts was too recent."""
    HELD_BACK = "held_back"
    """The request is held back during the search for a request whose steps always fail."""
    PAUSED = "paused"
    """An operator paused the engine."""
    RECOVERY = "recovery"
    """The pool or the workers are lost, so no step is planned. Only telemetry uses this."""
    ADAPTERS = "adapters"
    """The adapter is not loaded, or running requests use `max_loras` other adapters."""
    SESSION = "session"
    """The request is a session (with several turns) and waits for its next input."""
    REMOTE_KV = "remote_kv"
    """Keys and values are being loaded, or the KV connector does not know what it can load."""
    GRAMMAR = "grammar"
    """The grammar that the output must follow is not compiled yet."""
    ENCODER = "encoder"
    """The encoder has no budget or cache space in the step for the next item of the prompt."""
    OUTPUT_IN_FLIGHT = "output_in_flight"
    """The request was preempted while a step in flight sampled its next token."""


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
"""Reasons for which a step skips one request and then examines the next."""


def preparation_wait(request: Request) -> WaitReason:
    """The wait reason of a request whose adapter is being loaded or whose grammar compiles."""
    return WaitReason.ADAPTERS if request.awaits_adapter else WaitReason.GRAMMAR


class PreemptionCause(Enum):
    """Why running requests returned to the queue."""

    NO_BLOCKS = "no_blocks"
    """A running or waiting request needed the victim's blocks."""
    RESET = "reset"
    """An operator reset the prefix cache."""
    FAULT_SEARCH = "fault_search"
    """The search for a request whose steps always fail allows only few requests to run."""
    POOL_LOST = "pool_lost"
    """The pool ended or did not answer."""
    WORKERS_LOST = "workers_lost"
    """A worker ended or did not answer."""


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Request
    cause: Request
    """The request that needed the blocks. May be the victim itself."""
    num_lost_tokens: int
    """Number of the victim's tokens that were computed before its blocks were freed."""


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one engine step. `requests`, `num_scheduled_tokens` and `num_computed_tokens` are
    parallel, in scheduling order.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Number of each request's tokens that are computed before the step, prefix hit included."""
    block_tables: dict[Request, BlockTables] = field(default_factory=dict)
    """Maps requests that are admitted in this step to their complete block tables."""
    appended_blocks: dict[Request, BlockTables] = field(default_factory=dict)
    """Maps requests that were running before the step to their new blocks."""
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    """Maps requests to the draft tokens that the step verifies, after their other tokens."""
    prefill_chunks: frozenset[Request] = frozenset()
    """Requests with tokens left to compute after the step. The step samples no token for them."""
    new: list[Request] = field(default_factory=list)
    """Requests that are admitted for the first time."""
    resumed: list[Request] = field(default_factory=list)
    """Requests that are admitted again after a preemption."""
    preemptions: list[Preemption] = field(default_factory=list)
    """The preemptions of the step, in the order in which they happened."""
    wait_reason: WaitReason | None = None
    """Why the first waiting request that the step did not skip was not admitted. If the step
    skipped all waiting requests, this is the reason of the first one. None if no request waits.
    """
    retained: str = ""
    """If the wait reason is RETAINED, a text that explains which context is kept, and why."""
    encoder_inputs: dict[Request, list[int]] = field(default_factory=dict)
    """Maps a request to the indexes of the prompt items (such as images) that are encoded."""
    evicted_encoder_inputs: Sequence[str] = ()
    """Identifiers of prompt items whose embeddings the workers delete before the step."""
    passed_over: dict[Request, WaitReason] = field(default_factory=dict)
    """Waiting requests that the step skips, each with the reason."""
    removed_rows: Sequence[int] = ()
    """Rows (indexes of requests in the workers' persistent batch) freed since the previous plan."""
    block_ids_to_zero: Sequence[BlockId] = ()
    """Blocks that the workers zero before the step."""
    copies: Sequence[BlockCopy] = ()
    """Blocks that the workers copy before the step, in order."""
    loads: Sequence[KVLoad] = ()
    """Loads of the KV connector that begin with this step."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """What the KV connector sends from its scheduler side to its worker side."""
    awaits_transfers: bool = False
    """Whether KV transfers are in progress. Only the output of a step reports their ends."""
    dropped: AbstractSet[Request] = frozenset()
    """Requests for which the step samples tokens that will be discarded."""

    num_tokens: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether the step is sent to the workers. An empty step is not sent."""
        return bool(
            self.requests
            or self.removed_rows
            or self.evicted_encoder_inputs
            or self.kv_connector_metadata
            or self.awaits_transfers
        )

    @property
    def is_special(self) -> bool:
        """Whether the step does more than compute tokens, or discards tokens."""
        has_work = self.copies or self.block_ids_to_zero or self.loads or self.encoder_inputs
        return bool(has_work or self.draft_token_ids or self.dropped or self.preemptions)

    @property
    def preempted(self) -> list[Request]:
        return [preemption.victim for preemption in self.preemptions]


@dataclass(slots=True)  # not frozen: creation in each step would take three times as long
class ModelRunnerOutput:
    """The workers' output of a step. Lists are parallel to the plan's requests. Mappings and sets
    contain indexes of these requests.
    """

    token_ids: Sequence[Sequence[int]]
    """Sampled tokens of each request. Empty while a prompt is not complete."""
    draft_token_ids: Sequence[Sequence[int]] = ()
    """Drafts of each request for the next step. Empty if the workers propose none."""
    num_draft_tokens: Sequence[int] = ()
    """Number of drafts of each request that the workers verified. Empty if there were none."""
    logprobs: Mapping[int, object] = field(default_factory=dict)
    """Log-probabilities, which the scheduler passes on unread."""
    nan_requests: frozenset[int] = frozenset()
    """Requests whose logits contain NaN."""
    refused_tokens: Mapping[int, int] = field(default_factory=dict)
    """Position, in a request's sampled tokens, of the first token that its grammar refuses. Equals
    the number of sampled tokens if the workers did not send the refused token.
    """
    grammar_errors: Mapping[int, str] = field(default_factory=dict)
    """Errors of grammars that failed on the workers. Their requests are also in `refused_tokens`.
    """
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Vectors of prompts (embedding models), which the scheduler passes on unread."""
    execute_nanos: int = 0
    """Compute time of the workers, in nanoseconds; 0 if not measured."""
    slack_seconds: float | None = None
    """Seconds from the time when the step was ready to run until the previous step ended. Negative
    if the previous step ended first. None if not measured.
    """
    kv_transfers: KVTransferResults = NO_RESULTS


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """The new tokens of one request. May be empty if the request ended."""

    request: Request
    token_ids: Sequence[int]


@dataclass(slots=True)  # see ModelRunnerOutput
class EngineCoreOutputs:
    """The tokens that a step appended, and the requests that it ended, in scheduling order."""

    plan: SchedulerOutput
    token_ids: Sequence[Sequence[int] | None]
    """New tokens, parallel to the plan's requests. None if a request's tokens are discarded."""
    logprobs: Mapping[int, object]
    ended: Sequence[Request]
    """Requests that ended with the step. At the end of the list, in order of arrival, are requests
    whose KV load failed, and the requests in `failed`.
    """
    num_tokens: int
    turns: Mapping[Request, TurnEnd] = field(default_factory=dict)
    """Maps sessions (requests with several turns) whose turn ended with the step to `TurnEnd`."""
    execute_nanos: int = 0
    """Compute time of the workers, in nanoseconds; 0 if not measured."""
    pooled: Mapping[int, object] = field(default_factory=dict)
    """Maps the index of a request in the plan to the vector of its prompt."""
    failed: Sequence[Request] = ()
    """Waiting requests in `ended` that ended with an error, because no step could ever admit them.
    """
    num_draft_tokens: Sequence[int] = ()
    """Number of verified drafts, parallel to the plan's requests. Empty if there were none."""

    @property
    def num_accepted(self) -> list[int]:
        """Number of accepted drafts of each request that had drafts."""
        counts = zip(self.num_draft_tokens, self.token_ids, strict=True)
        return [max(len(tokens or ()) - 1, 0) for num_drafts, tokens in counts if num_drafts]

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        failed = {*self.failed}
        ended = {*self.ended, *self.turns} - failed
        for index, (request, tokens) in enumerate(
            zip(self.plan.requests, self.token_ids, strict=True)
        ):
            if tokens or (tokens is not None and (index in self.logprobs or request in ended)):
                yield EngineCoreOutput(request, tokens)
        for request in self.ended:
            if request in failed or request.finish_reason is FinishReason.KV_LOAD_FAILED:
                yield EngineCoreOutput(request, ())
