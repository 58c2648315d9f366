"""A request as the scheduler sees it: tokens, and a count of how many of them are computed."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash, hash_full_blocks
from services.common.ids import RequestKey
from services.common.prompt_embeds import PromptEmbeds
from services.common.repetition import RepetitionDetection


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_IN_LOGITS = "nan_in_logits"
    """The model broke: no token could be chosen."""
    REPETITION = "repetition"
    """The output went round in circles."""
    STEP_FAILED = "step_failed"
    """The workers were lost in every step of the request, also where it was alone."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited as long as it may without being scheduled."""


@dataclass(slots=True, eq=False)
class Clock:
    """Counts the steps that were planned."""

    now: int = 0


STANDING = Clock()
"""Counts nothing."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a request ends by itself."""

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    repetition: RepetitionDetection | None = None
    min_tokens: int = 0
    """Output without which no repetition is looked for; the sampler sees to the other ends."""
    ending_token_ids: frozenset[int] = field(init=False)
    """Both together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ending_token_ids", self.eos_token_ids | self.stop_token_ids)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Equal only to itself."""

    request_id: str
    key: RequestKey
    """Identifies it to the pool; not used twice in the life of a scheduler."""
    token_ids: list[int]
    """Prompt, then output; grows as tokens are sampled."""
    num_prompt_tokens: int
    stop: StopConditions
    priority: int = 0
    arrival_time: float = 0.0
    """Seconds on any clock that all requests of a replica share."""
    latest_start: float | None = None
    """When it is of no use any more to schedule it for the first time, in seconds on the clock of
    what watches the queue.
    """
    cache_salt: str = ""
    traceparent: str = ""
    queued_unix_nanos: int = 0
    """When this replica was given it, which for one that comes from a lost replica is long after
    its arrival; carried through, for traces.
    """
    sampling: object = None
    """How the worker samples; carried through."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's tokens, which are placeholders then; carried through.
    `cache_salt` keeps its blocks apart from those of other embeddings.
    """
    reads_prefix_cache: bool = True
    """False where every prompt position must be computed, as for prompt log-probabilities."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    origin: int = 0
    clock: Clock = STANDING
    """`num_computed_tokens` is the sum of both. While the clock ticks, the request decodes in
    stride: each step computes one more token, needs nothing of the pool, and can end it only by
    that token.
    """
    ending_token_ids: frozenset[int] = field(init=False, default=frozenset())
    """Those of `stop`, at hand."""
    wakes_at: int = 0
    """When a stride is over, by its clock."""
    turn: int = 0
    """Its place in the order of admissions."""
    max_num_tokens: int = 0
    """Tokens, prompt and output, at which it ends for its length; set when it is queued."""
    is_prefill_chunk: bool = False
    """Whether the last step left tokens to compute before one can be sampled."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses at the tokens after the last one, -1 where only the workers know them."""
    num_slots: int = 0
    """Tokens that its block table can hold."""
    row: int | None = None
    """Its row in the workers' batch while it runs."""
    num_cached_tokens: int | None = None
    """Prefix hit when it was first scheduled; None before."""
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of its full blocks, as far as they have been needed."""
    known_to_pool: bool = False
    num_hashes_sent: int = 0
    """How many of `block_hashes` the pool has been told."""
    num_committed_blocks: int = 0
    """Full blocks published under their hash."""

    def __post_init__(self) -> None:
        self.ending_token_ids = self.stop.ending_token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are stored, or will be once the steps in flight have run."""
        return self.origin + self.clock.now

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
    def max_hit_tokens(self) -> int:
        """Longest cached prefix of use: one token must be left to compute, to sample from."""
        return len(self.token_ids) - 1 if self.reads_prefix_cache else 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def hash_full_blocks(self, root: bytes, block_size: int) -> None:
        """Brings `block_hashes` up to the tokens known."""
        known = self.block_hashes
        if (len(known) + 1) * block_size <= len(self.token_ids):
            known += hash_full_blocks(
                root, self.token_ids, block_size, cache_salt=self.cache_salt, known=known
            )

    def forget_blocks(self) -> None:
        """Back to nothing computed: what it held in pool and workers is gone.

        It does not run any more. Tokens of steps in flight may still come.
        """
        self.draft_token_ids = []
        self.is_prefill_chunk = False
        self.origin = self.num_slots = 0
        self.num_hashes_sent = self.num_committed_blocks = 0
        self.known_to_pool = False
        self.row = None

    def append_output_token_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Takes sampled tokens up to one that ends the request; returns those taken.

        Checked in vLLM's order: end of sequence, stop tokens, length, then repetition. The sampler
        keeps the first two from coming before min_tokens.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if token_id in self.ending_token_ids:
                self.finish(FinishReason.STOP)
                if token_id not in self.stop.eos_token_ids:
                    self.stop_token_id = token_id
                return token_ids[:count]
            if len(self.token_ids) >= self.max_num_tokens:
                self.finish(FinishReason.LENGTH)
                return token_ids[:count]
            if self.stop.repetition is not None and self._repeats_itself(self.stop.repetition):
                self.finish(FinishReason.REPETITION)
                return token_ids[:count]
        return token_ids

    def _repeats_itself(self, repetition: RepetitionDetection) -> bool:
        return self.num_output_tokens >= self.stop.min_tokens and repetition.found_at_end(
            self.token_ids, self.num_prompt_tokens
        )

    def finish(self, reason: FinishReason) -> None:
        """Ends the request."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
