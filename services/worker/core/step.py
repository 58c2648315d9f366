"""The input and the output of a step, as the runner uses them.

A request's row is its index in the persistent batch. The tier is host memory to which KV blocks are
offloaded.
"""

from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np

from services.common.request.pooling import PoolingParams
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import Float32Array, Int32Array
from services.worker.sampling.logprobs import LogprobRows


def no_ints() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    row: int
    token_ids: Int32Array
    """Prompt tokens, followed by the output tokens that the scheduler knows."""
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: tuple[Int32Array, ...]
    """Block ids, one table for each KV-cache group."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings of the placeholder tokens. The first may be missing if they are computed."""
    num_placeholders: int = 0
    """Number of tokens at the beginning of the prompt that are placeholders for embeddings."""
    pooling: PoolingParams | None = None
    """How the request's prompt is pooled. None for models that generate text."""
    adapter_digest: bytes = b""
    """SHA-256 of the LoRA adapter's files, or empty without an adapter."""
    cache_key: bytes = b""
    """The root of the request's block hashes. Requests with other roots share no cached blocks."""


@dataclass(frozen=True, slots=True)
class AppendedBlocks:
    """Blocks appended to the block tables of one KV-cache group. Row `rows[i]` gets `num_blocks[i]`
    blocks. `block_ids` concatenates the blocks of all rows.
    """

    rows: Int32Array
    num_blocks: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Pairs of a block in the KV cache and a block in the tier. A store copies to the tier, a load
    from it. The key of a pair is a block hash, followed by the KV-cache group as a big-endian
    uint32.
    """

    block_ids: Int32Array
    tier_block_ids: Int32Array
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Blocks to load from the tier for one request. Steps do not use them before the load ends."""

    request: int
    blocks: TierBlocks


@dataclass(frozen=True, slots=True)
class EndedTierLoad:
    """A load that has ended, and the ids of those target blocks that were not loaded."""

    request: int
    invalid_block_ids: Int32Array


@dataclass(slots=True)  # not frozen, because constructing it would take three times as long
class StepInput:
    """A step's changes to the batch, and the tokens to compute. Arrays with one entry for each
    request are parallel to `rows`. Optional arrays may be empty.

    A step is executed in this order:

    1. Rows are removed, new requests are added, and blocks are appended to block tables.
    2. Blocks are stored in the tier, cleared, and copied. Then loads from the tier begin.
    3. The tokens of `rows` are computed.
    """

    generation: int
    """A number that increases when the scheduler opens the KV pool again. Before the first step of
    a generation, the worker empties its batch.
    """
    step: int
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    """Number of tokens to compute for each request, including its draft tokens."""
    num_computed_tokens: Int32Array
    removed_rows: Int32Array = field(default_factory=no_ints)
    new_requests: tuple[NewRequest, ...] = ()
    appended_blocks: tuple[AppendedBlocks, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
    """Number of drafts of each request. They are the last of its scheduled tokens."""
    draft_token_ids: Int32Array = field(default_factory=no_ints)
    """The drafts of all requests, concatenated. The worker proposes each draft whose id is -1."""
    block_ids_to_zero: Int32Array = field(default_factory=no_ints)
    """Blocks to clear in all layers."""
    copy_sources: Int32Array = field(default_factory=no_ints)
    """Blocks to copy in all layers, in order: `copy_sources[i]` to `copy_targets[i]`."""
    copy_targets: Int32Array = field(default_factory=no_ints)
    last_token_ids: Int32Array = field(default_factory=no_ints)
    """The last scheduled token of each request. Only pipeline stages that do not sample need it."""
    tier_stores: TierBlocks | None = None
    tier_loads: tuple[TierLoad, ...] = ()
    digest: int = 0
    """The digest of the step's message, below 2^32, or 0 if the worker is a single rank."""

    def copy(self) -> "StepInput":
        """Returns a shallow copy, several times as fast as `dataclasses.replace`."""
        return StepInput(*_fields_of(self))


_fields_of = attrgetter(*(one.name for one in fields(StepInput)))


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log-probabilities of one request's sampled and prompt tokens, or None if not requested."""

    sampled: LogprobRows | None
    prompt: LogprobRows | None


@dataclass(slots=True)  # not frozen, see StepInput
class StepOutput:
    """The output of a step. A request is identified by its index in `StepInput.rows`."""

    generation: int
    step: int
    num_tokens: Int32Array
    """Number of sampled tokens of each request."""
    token_ids: Int32Array
    """The sampled tokens of all requests, concatenated."""
    logprobs: dict[int, RequestLogprobs] = field(default_factory=dict)
    nan_requests: Int32Array = field(default_factory=no_ints)
    """Requests whose logits contained NaN."""
    refused_tokens: dict[int, int] = field(default_factory=dict)
    """Maps requests to the index of their first sampled token that the grammar refused."""
    grammar_errors: dict[int, str] = field(default_factory=dict)
    """Maps requests to the reason why the request's grammar failed."""
    pooled: dict[int, Float32Array] = field(default_factory=dict)
    """Maps requests whose prompts this step completes to their pooled vectors."""
    waited_nanos: int = 0
    """The time that the step waited for the previous pipeline stage, in nanoseconds."""
    ended_tier_loads: tuple[EndedTierLoad, ...] = ()
    """Loads from the tier that have ended and were not reported with an earlier step."""
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
    """For each request, the number of drafts that the step verified. Empty if it verified none."""
