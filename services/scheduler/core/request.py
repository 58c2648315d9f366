"""A request as the scheduler sees it: tokens, and a count of how many of them are computed."""

import copy
import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash, hash_full_blocks
from services.common.pool.ids import RequestKey
from services.common.pool.operations import Admission, BlockTables
from services.common.request.encoder_input import EncoderInput
from services.common.request.finish import append_until_end, ending_token_ids
from services.common.request.finish_reason import FinishReason
from services.common.request.pooling import PoolingParams
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.planning.computed_tokens import ComputedTokens
from services.scheduler.core.timelines.timeline import RequestTimes


class RequestStatus(enum.Enum):
    """The states of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    WAITING_FOR_CHUNK = "waiting_for_chunk"
    """A session whose turn is over, and whose next one has no input yet."""
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """Keys and values are loaded into its blocks."""
    FINISHED = "finished"

    @property
    def is_blocked(self) -> bool:
        """Whether a waiting request cannot be admitted before something else has happened."""
        return self in _BLOCKED


_BLOCKED = frozenset({RequestStatus.WAITING_FOR_CHUNK, RequestStatus.WAITING_FOR_REMOTE_KVS})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Why a turn of a session ended; the session goes on."""

    finish_reason: FinishReason
    stop_token_id: int | None
    """The stop token that ended it; None if none did."""
    turn: "Request"
    """The session as it was at the end of the turn, for its last delta, metrics and traces."""


@dataclass(slots=True, eq=False)
class Request(ComputedTokens):
    """One sequence. Equal only to itself."""

    request_id: str
    """For logs, traces and aborts."""
    key: RequestKey
    """Its number in the pool's operations, never used twice by one scheduler process."""
    token_ids: list[int]
    """Prompt, then output; grows as tokens are sampled."""
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    """Smaller runs earlier under the priority policy; 0 under first come, first served."""
    arrival_time: float = 0.0
    """Seconds on any clock that all requests of a replica share."""
    latest_start: float | None = None
    """When it must have been scheduled for the first time, in monotonic seconds; None: no limit."""
    cache_salt: str = ""
    """Only requests with the same one find each other's cached prefixes."""
    adapter_digest: bytes = b""
    """SHA-256 of the files of its adapter; empty: it has none. With other content an adapter of the
    same name is another one.
    """
    adapter_name: str = ""
    """The name by which clients ask for its adapter."""
    awaits_adapter: bool = False
    """Whether the workers have yet to load it; `grammar` is COMPILING then."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """Items of the prompt whose embeddings an encoder computes, in the order of their offsets."""
    traceparent: str = ""
    tracestate: str = ""
    """The caller's, for traces; carried through, as is `baggage`."""
    baggage: str = ""
    queued_unix_nanos: int = 0
    """When it came to this replica; carried through, for traces."""
    hashed_unix_nanos: int = 0
    """When its prompt had been hashed apart from the steps; 0 if it was not. Carried through."""
    times: RequestTimes | None = None
    """Where its time went, once it has ended; carried through."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's tokens, which are placeholders then; carried through."""
    pooling: PoolingParams | None = None
    """How the workers pool its prompt, where the model does that; carried through."""
    num_choices: int = 0
    """The client's parameter n, in the first sequence of a prompt; 0 in the others. Carried
    through, for metrics.
    """
    resumable: bool = False
    """Whether it is a session: at the end of its output it waits for the next chunk of input, and
    keeps its blocks.
    """
    turn_ended_unix_nanos: int = 0
    """When the turn of a session before this one ended; carried through, for traces."""
    chunks: deque[InputChunk | None] = field(default_factory=deque)
    """Input of a session's next turns that came before they begin; None ends it after this turn."""
    reads_prefix_cache: bool = True
    """False where every prompt position must be computed, as for prompt log-probabilities."""

    grammar: GrammarStatus | None = None
    """Whether the workers have compiled its grammar, and loaded its adapter; None: it needs neither
    of them.
    """
    error: str = ""
    """The error that ended it, or ends it when it is scheduled; empty if there is none."""
    error_reason: FinishReason = FinishReason.ERROR
    """How it ends for that, if it has not yet run."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    """None before its end, or that of its turn."""
    stop_token_id: int | None = None
    """The stop token that ended it; None if none did."""
    ending_token_ids: frozenset[int] = field(init=False, default=frozenset())
    """Tokens that end the request: end of sequence and stop tokens."""
    fast_path_end: int = 0
    """The step before which it leaves the fast path, while it is on it."""
    admission_number: int = 0
    """Grows with each admission; orders the running requests."""
    max_num_tokens: int = 0
    """Tokens, prompt and output, at which it ends for its length; set when it is queued."""
    is_prefill_chunk: bool = False
    """Whether the last step left tokens to compute before one can be sampled."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Drafts of the tokens after the last one, -1 where only the workers know them."""
    num_slots: int = 0
    """Tokens that its block table can hold."""
    num_tokens_left_behind: int = 0
    """Stored tokens by which its windows have moved, where they give blocks back. A session whose
    last tokens are dropped may have fewer computed ones.
    """
    row: int | None = None
    """Its row in the workers' batch while it runs."""
    awaited_step: int | None = None
    """The last step in flight that computed tokens of it when it was preempted last, whose output
    comes before it is admitted again; None if there was none.
    """
    num_cached_tokens: int | None = None
    """Prefix hit when it was first scheduled, of a session in its present turn; None before."""
    num_external_tokens: int = 0
    """Tokens that its last load brought from elsewhere."""
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of its full blocks, as far as they were computed."""
    known_to_pool: bool = False
    """Whether the pool has hashes or blocks of it that a Release must give back."""
    num_hashes_sent: int = 0
    """How many of `block_hashes` were sent to the pool."""
    num_committed_blocks: int = 0
    """Full blocks published under their hash; with blocks of several sizes, hashes published."""
    shared_prefix_boundary: int = 0
    """The end of a prefix that another request computed too, but that is no hit since not all
    groups have their part of it; 0 if there is none. By its last look-up, as in vLLM.
    """

    def __post_init__(self) -> None:
        self.ending_token_ids = ending_token_ids(self.sampling)

    @property
    def log_fields(self) -> dict[str, str]:
        """For log lines about it: its id and, if it is traced from its beginning, its trace's."""
        fields = {"request_id": self.request_id}
        if self.traceparent:
            fields["trace_id"] = self.traceparent.split("-")[1]
        return fields

    @property
    def num_tokens(self) -> int:
        """Prompt and output known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_output_placeholders(self) -> int:
        """Tokens that steps in flight are about to sample, drafts included."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def holds_blocks(self) -> bool:
        """Whether it has a block table in the pool."""
        return self.num_slots > 0

    @property
    def max_hit_tokens(self) -> int:
        """Longest cached prefix of use: one token must be left to compute, to sample from."""
        return len(self.token_ids) - 1 if self.reads_prefix_cache else 0

    @property
    def unsent_hashes(self) -> Sequence[BlockHash]:
        """The end of `block_hashes` that the pool does not have yet."""
        return self.block_hashes[self.num_hashes_sent :]

    @property
    def num_encoded_tokens(self) -> int:
        """The position after its last item; 0 if it has none."""
        return self.encoder_inputs[-1].end if self.encoder_inputs else 0

    @property
    def is_blocked(self) -> bool:
        """Whether it waits and cannot be admitted before something else has happened to it."""
        return self.status.is_blocked or self.grammar is GrammarStatus.COMPILING

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def limit_length(self, max_model_len: int) -> None:
        """Sets the length at which its output ends."""
        self.max_num_tokens = max_model_len
        if self.sampling.max_tokens is not None:
            longest = self.num_prompt_tokens + self.sampling.max_tokens
            self.max_num_tokens = min(longest, max_model_len)

    def end_turn(self, block_size: int) -> TurnEnd:
        """Lets a session whose output ended wait for input. Its last token is dropped, since
        nothing was computed of it; the rest of the output becomes prompt.
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
        """Counts no token as computed that steps in flight compute after the end of a turn."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def begin_turn(self, chunk: InputChunk, max_model_len: int) -> None:
        """Continues a session with further prompt."""
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
        """Waits again like others after a load."""
        preempted, waiting = RequestStatus.PREEMPTED, RequestStatus.WAITING
        self.status = preempted if self.num_preemptions else waiting

    def hash_full_blocks(self, root: bytes, block_size: int) -> None:
        """Computes the hashes of all full blocks of known tokens."""
        if (len(self.block_hashes) + 1) * block_size <= len(self.token_ids):
            self.block_hashes += self._further_hashes(root, block_size, self.token_ids)

    def hashes_with(
        self, root: bytes, block_size: int, token_ids: Sequence[int]
    ) -> list[BlockHash]:
        """The hashes that it lacks of its full blocks, if these tokens followed."""
        return self._further_hashes(root, block_size, [*self.token_ids, *token_ids])

    def _further_hashes(
        self, root: bytes, block_size: int, token_ids: Sequence[int]
    ) -> list[BlockHash]:
        return hash_full_blocks(
            root,
            token_ids,
            block_size,
            cache_salt=self.cache_salt,
            adapter_digest=self.adapter_digest,
            encoder_inputs=self.encoder_inputs,
            known=self.block_hashes,
        )

    def take_blocks(
        self, terms: Admission, blocks: BlockTables, block_size: int, hash_block_size: int
    ) -> None:
        """Notes what the request has in the pool once it was admitted on these terms."""
        self.num_computed_tokens = terms.num_computed_tokens
        self.num_slots = len(blocks[0]) * block_size
        self.num_committed_blocks = terms.num_commit_tokens // hash_block_size
        self.num_hashes_sent = len(self.block_hashes)
        self.known_to_pool = True

    def forget_blocks(self) -> None:
        """Resets what the request had in pool and workers: nothing of it is computed. It does not
        run any more; tokens of steps in flight may still come.
        """
        self.draft_token_ids = []
        self.is_prefill_chunk = False
        self.num_computed_tokens = self.num_slots = self.num_tokens_left_behind = 0
        self.num_hashes_sent = self.num_committed_blocks = 0
        self.known_to_pool = False
        self.row = None

    def append_output_token_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Appends sampled tokens up to one that ends the request; returns those appended."""
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
        """Ends the request: something went wrong that concerns no other."""
        self.error = error
        self.finish(reason)

    def finish(self, reason: FinishReason) -> None:
        """Ends the request."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
