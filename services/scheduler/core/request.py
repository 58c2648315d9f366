"""A request: a list of tokens, and the number of tokens that are computed. A session is a request
with several turns: after each answer it keeps its blocks and waits for further input. A program is
the series of requests of one run of an agent. A context is the KV blocks that an ended request of a
program has left in the pool.
"""

import copy
import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash, hash_full_blocks
from services.common.pool.ids import ContextId, RequestKey
from services.common.pool.operations import Admission, BlockTables
from services.common.request.encoder_input import EncoderInput
from services.common.request.finish import FinishReason, append_until_end, ending_token_ids
from services.common.request.pooling import PoolingParams
from services.common.request.program import DeclaredProgram
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.scheduler.core.computed_tokens import ComputedTokens
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.program_turn import ProgramTurn
from services.scheduler.core.timelines.timeline import RequestTimes


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    WAITING_FOR_CHUNK = "waiting_for_chunk"
    """The request is a session between two turns, and the input of its next turn is missing."""
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """Keys and values are being loaded into the request's blocks."""
    FINISHED = "finished"

    @property
    def is_blocked(self) -> bool:
        """Whether a request with this status cannot be admitted until the status changes."""
        return self in _BLOCKED


_BLOCKED = frozenset({RequestStatus.WAITING_FOR_CHUNK, RequestStatus.WAITING_FOR_REMOTE_KVS})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of a turn of a session. The session itself continues."""

    finish_reason: FinishReason
    stop_token_id: int | None
    """The stop token that ended the turn. None if it ended for another reason."""
    turn: "Request"
    """A copy of the session at the turn's end, for output, metrics and traces of the turn."""


@dataclass(slots=True, eq=False)
class Request(ComputedTokens):
    """One sequence: a prompt and one answer. Requests are compared by identity."""

    request_id: str
    """The id in logs, traces and aborts."""
    key: RequestKey
    """The request's number in pool operations. One scheduler process never uses a number twice."""
    token_ids: list[int]
    """The prompt's tokens, followed by the output's tokens. Sampled tokens are appended."""
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    """Under the policy `priority`, requests with a smaller value run earlier. 0 under `fcfs`."""
    arrival_time: float = 0.0
    """Time of arrival, in seconds. All requests of a replica use the same clock."""
    latest_start: float | None = None
    """The time, in monotonic seconds, at which the request ends if it was not admitted, or None."""
    cache_salt: str = ""
    """Requests can hit each other's cached prefixes only if their salts are equal."""
    adapter_digest: bytes = b""
    """SHA-256 of the files of the request's adapter. Empty if it has none."""
    adapter_name: str = ""
    """The name of the adapter in clients' requests."""
    awaits_adapter: bool = False
    """Whether the workers are still loading the adapter. Until then, `grammar` is COMPILING."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """Items of the prompt, such as images, that the encoder computes, in order of position."""
    traceparent: str = ""
    tracestate: str = ""
    """`traceparent`, `tracestate` and `baggage` are the client's trace context."""
    baggage: str = ""
    queued_unix_nanos: int = 0
    """Time of arrival at this replica, in Unix nanoseconds. Only used by telemetry."""
    hashed_unix_nanos: int = 0
    """Time at which the prompt's block hashes were complete, in Unix nanoseconds. 0 if they were
    not computed before the request was queued. Only used by telemetry.
    """
    times: RequestTimes | None = None
    """How long each phase of the request lasted. Set by telemetry when the request ends."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings that replace the prompt's tokens. Only used by the workers."""
    pooling: PoolingParams | None = None
    """How the workers compute one vector from the prompt. None for generative models."""
    num_choices: int = 0
    """The client's `n` (answers per prompt), set in the first request of a prompt, for metrics."""
    resumable: bool = False
    """Whether the request is a session."""
    turn_ended_unix_nanos: int = 0
    """Time of the end of a session's previous turn, in Unix nanoseconds. Only used by traces."""
    chunks: deque[InputChunk | None] = field(default_factory=deque)
    """Inputs of a session's next turns that have already arrived. None ends the session."""
    reads_prefix_cache: bool = True
    """False if every prompt token must be computed, as for prompt log-probabilities."""

    program: DeclaredProgram | None = None
    """The fields of the client's request that name its program."""
    program_turn: ProgramTurn | None = None
    """The request's turn in its program. None if the policy does not group requests into programs.
    """
    tenant: bytes = b""
    """Identifies the owner of the API key. Empty if the gateway has no API keys."""
    tenant_weight: float = 1.0
    """The tenant's weight when the blocks of contexts are divided among tenants."""
    tenant_max_retained_share: float = 1.0
    """Limit on the blocks of the tenant's contexts, as a fraction of the pool."""
    context: ContextId | None = None
    """The context that the request's blocks became at its end. None if there is none."""
    grammar: GrammarStatus | None = None
    """Whether the workers have prepared the grammar and the adapter. None if there is neither."""
    error: str = ""
    """The error with which the request ended, or will end when a step tries to admit it."""
    error_reason: FinishReason = FinishReason.ERROR
    """The finish reason that the request gets together with `error`, if it was not admitted."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    """Why the request or its turn ended. None until it ends."""
    stop_token_id: int | None = None
    """The stop token that ended the request. None if it ended for another reason."""
    ending_token_ids: frozenset[int] = field(init=False, default=frozenset())
    """The end-of-sequence tokens and stop tokens that end the request."""
    fast_path_end: int = 0
    """The step before which the request leaves the fast path (see `RunningRequests`)."""
    admission_number: int = 0
    """Increases with each admission, and orders the running requests."""
    max_num_tokens: int = 0
    """Total number of tokens at which the request ends. Set when the request is queued."""
    is_prefill_chunk: bool = False
    """Whether prompt or earlier output tokens remain to be computed after the last planned step."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens that follow `token_ids`. -1 stands for a draft that only the workers know."""
    num_slots: int = 0
    """Number of slots in the block table. A slot is memory for one token."""
    num_tokens_left_behind: int = 0
    """Number of stored tokens when the pool last freed blocks that sliding windows had left. May
    exceed a session's number of computed tokens, because the end of a turn discards tokens.
    """
    row: int | None = None
    """The request's index in the workers' persistent batch. None while it does not run."""
    awaited_step: int | None = None
    """The last step that was in flight with tokens of the request when it was preempted. The output
    of this step must arrive before the request is admitted again. None if there was none.
    """
    num_cached_tokens: int | None = None
    """Number of cached tokens at the first admission of the request or turn. None before it."""
    num_external_tokens: int = 0
    """Number of tokens that the KV connector loaded at the last admission."""
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    """Number of computed tokens that the last preemption discarded. 0 after the next admission."""
    num_recomputed_tokens: int = 0
    """Total number of tokens that are computed again because of preemptions."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the first full blocks. Hashes of later full blocks are not computed yet."""
    known_to_pool: bool = False
    """Whether the pool stores hashes or blocks of the request, which a Release operation frees."""
    num_hashes_sent: int = 0
    """Number of leading `block_hashes` that were sent to the pool."""
    num_committed_blocks: int = 0
    """Number of leading `block_hashes` whose blocks are published (cached for prefix hits)."""
    shared_prefix_boundary: int = 0
    """Length, in tokens, of a prefix that another request has computed. It is no prefix hit,
    because only some KV-cache groups have cached it. 0 if the last lookup found no such prefix.
    """

    def __post_init__(self) -> None:
        self.ending_token_ids = ending_token_ids(self.sampling)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields for log records: the request id, and the trace id if the request is traced."""
        fields = {"request_id": self.request_id}
        if self.traceparent:
            fields["trace_id"] = self.traceparent.split("-")[1]
        return fields

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_output_placeholders(self) -> int:
        """Number of tokens that steps in flight may sample, accepted drafts included."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def holds_blocks(self) -> bool:
        return self.num_slots > 0

    @property
    def max_hit_tokens(self) -> int:
        """Limit on the prefix hit, in tokens, because at least one token must be computed."""
        return len(self.token_ids) - 1 if self.reads_prefix_cache else 0

    @property
    def unsent_hashes(self) -> Sequence[BlockHash]:
        return self.block_hashes[self.num_hashes_sent :]

    @property
    def num_encoded_tokens(self) -> int:
        """The position after the last item of `encoder_inputs`. 0 if there are no items."""
        return self.encoder_inputs[-1].end if self.encoder_inputs else 0

    @property
    def is_blocked(self) -> bool:
        """Whether the request cannot be admitted until its status or its grammar changes."""
        return self.status.is_blocked or self.grammar is GrammarStatus.COMPILING

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def limit_length(self, max_model_len: int) -> None:
        self.max_num_tokens = max_model_len
        if self.sampling.max_tokens is not None:
            longest = self.num_prompt_tokens + self.sampling.max_tokens
            self.max_num_tokens = min(longest, max_model_len)

    def finish_turn(self, block_size: int) -> TurnEnd:
        """Ends the turn of a session, which then waits for input. Removes the last output token,
        because it was sampled but not computed. The other output tokens become part of the prompt.
        """
        if self.finish_reason is None:
            raise AssertionError(f"the turn of {self.request_id} has not ended")
        end = TurnEnd(self.finish_reason, self.stop_token_id, copy.copy(self))
        self.finish_reason = self.stop_token_id = None
        self.forget_ahead()
        self.token_ids = self.token_ids[:-1]
        del self.block_hashes[len(self.token_ids) // block_size :]
        self.num_prompt_tokens = len(self.token_ids)
        self.draft_token_ids = []
        self.is_prefill_chunk = False
        self.status = RequestStatus.WAITING_FOR_CHUNK
        return end

    def forget_ahead(self) -> None:
        """Does not count tokens as computed that steps in flight sample after a turn's end."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def begin_turn(self, chunk: InputChunk, max_model_len: int) -> None:
        """Begins the next turn of a session with the prompt tokens of `chunk`."""
        self.token_ids += chunk.token_ids
        self.block_hashes += chunk.block_hashes
        self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = None
        self.sampling = chunk.sampling
        self.arrival_time = chunk.arrival_time
        self.request_id = chunk.request_id or self.request_id
        self.traceparent, self.tracestate = chunk.traceparent, chunk.tracestate
        self.baggage, self.queued_unix_nanos = chunk.baggage, chunk.queued_unix_nanos
        self.hashed_unix_nanos, self.latest_start, self.times = 0, None, None
        self.ending_token_ids = ending_token_ids(self.sampling)
        self.limit_length(max_model_len)
        self.status = RequestStatus.WAITING

    def stop_loading(self) -> None:
        """Makes the request wait for admission after its KV load has ended."""
        preempted, waiting = RequestStatus.PREEMPTED, RequestStatus.WAITING
        self.status = preempted if self.num_preemptions else waiting

    def hash_full_blocks(self, root: bytes, block_size: int) -> None:
        if (len(self.block_hashes) + 1) * block_size <= len(self.token_ids):
            self.block_hashes += self.hashes_with(root, block_size, ())

    def hashes_with(
        self, root: bytes, block_size: int, token_ids: Sequence[int]
    ) -> list[BlockHash]:
        """Hashes of the full blocks that `token_ids` would fill if they were appended."""
        return hash_full_blocks(
            root,
            [*self.token_ids, *token_ids] if token_ids else self.token_ids,
            block_size,
            cache_salt=self.cache_salt,
            adapter_digest=self.adapter_digest,
            encoder_inputs=self.encoder_inputs,
            known=self.block_hashes,
        )

    def take_blocks(
        self, terms: Admission, blocks: BlockTables, block_size: int, hash_block_size: int
    ) -> None:
        """Records the blocks and hashes that the request has in the pool after an admission."""
        self.num_computed_tokens = terms.num_computed_tokens
        if self.num_discarded_tokens:
            num_again = self.num_discarded_tokens - terms.num_computed_tokens
            self.num_recomputed_tokens += max(0, num_again)
            self.num_discarded_tokens = 0
        # A KV-cache group of states may allocate no block when a prompt of one token is loaded.
        self.num_slots = len(blocks[0]) * block_size or terms.num_slots
        self.num_committed_blocks = terms.num_commit_tokens // hash_block_size
        self.num_hashes_sent = len(self.block_hashes)
        self.known_to_pool = True

    def forget_blocks(self) -> None:
        """Records that the request has no blocks, batch row and computed tokens any more."""
        self.draft_token_ids = []
        self.is_prefill_chunk = False
        self.num_computed_tokens = self.num_slots = self.num_tokens_left_behind = 0
        self.num_hashes_sent = self.num_committed_blocks = 0
        self.known_to_pool = False
        self.row = None

    def append_output_token_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Appends tokens up to the first one that ends the request. Returns these tokens."""
        num_known = len(self.token_ids)
        finish = append_until_end(
            self.token_ids,
            token_ids,
            self.num_prompt_tokens,
            self.max_num_tokens,
            self.ending_token_ids,
            self.sampling,
        )
        if finish is None:
            return token_ids
        self.finish(finish.reason)
        self.stop_token_id = finish.stop_token_id
        return token_ids[: len(self.token_ids) - num_known]

    def fail(self, error: str, reason: FinishReason = FinishReason.ERROR) -> None:
        self.error = error
        self.finish(reason)

    def finish(self, reason: FinishReason) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
