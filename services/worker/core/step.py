"""Input and output of one engine step, as the runner uses them."""

from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.common.request.pooling import PoolingParams
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.worker.sampling.logprobs import LogprobRows

Int32Array = npt.NDArray[np.int32]


def no_ints() -> Int32Array:
    """An empty array."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the batch."""

    row: int
    token_ids: Int32Array
    """Prompt, then the output known so far."""
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: tuple[Int32Array, ...]
    """Block ids, a table for each KV-cache group."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings of the last of its placeholders; those of tokens that are computed already may be
    left out.
    """
    num_placeholders: int = 0
    """Tokens at the beginning that are placeholders for embeddings."""
    pooling: PoolingParams | None = None
    """How its prompt is pooled; None where the model generates."""
    adapter_digest: bytes = b""
    """SHA-256 of the files of its adapter; empty if it has none."""
    cache_key: bytes = b""
    """See block_hash.cache_key."""


@dataclass(frozen=True, slots=True)
class AppendedBlocks:
    """Blocks appended to tables of one group: `num_blocks[i]` of the concatenated ids to the table
    of `rows[i]`.
    """

    rows: Int32Array
    num_blocks: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of the cache, the tier's blocks with the same contents, and the keys of what they
    hold: a block hash and the KV-cache group as a big-endian uint32. Parallel.
    """

    block_ids: Int32Array
    tier_block_ids: Int32Array
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A load of one request from the tier into blocks that no step uses before it has ended."""

    request: int
    blocks: TierBlocks


@dataclass(frozen=True, slots=True)
class EndedTierLoad:
    """A load that has ended, and the blocks of the cache that were not loaded."""

    request: int
    invalid_block_ids: Int32Array


@dataclass(slots=True)  # not frozen, as it is made in each step: that would take thrice the time
class StepInput:
    """A difference to the batch, and the tokens to compute. Arrays of requests are parallel to
    `rows`; those that most steps do not need may be empty.

    The parts are applied in this order:

    1. Rows are removed, new requests enter, blocks are appended to tables.
    2. Blocks are stored in the tier, cleared, and copied; then loads from the tier begin.
    3. The tokens of `rows` are computed.
    """

    generation: int
    """If this is another one than that of the step before, batch and cache start empty."""
    step: int
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    """Tokens to compute, drafts included."""
    num_computed_tokens: Int32Array
    removed_rows: Int32Array = field(default_factory=no_ints)
    new_requests: tuple[NewRequest, ...] = ()
    appended_blocks: tuple[AppendedBlocks, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
    """How many of the scheduled tokens, the last ones, are drafts."""
    draft_token_ids: Int32Array = field(default_factory=no_ints)
    """The drafts, concatenated; -1 where they are to be proposed here, see drafter.py."""
    block_ids_to_zero: Int32Array = field(default_factory=no_ints)
    """Blocks that are cleared in all layers."""
    copy_sources: Int32Array = field(default_factory=no_ints)
    """Blocks that are copied in all layers, one after the other, to those of `copy_targets`."""
    copy_targets: Int32Array = field(default_factory=no_ints)
    last_token_ids: Int32Array = field(default_factory=no_ints)
    """The last scheduled token of each request, for pipeline stages that do not sample."""
    tier_stores: TierBlocks | None = None
    tier_loads: tuple[TierLoad, ...] = ()
    digest: int = 0
    """Of the message, below 2^32, where ranks compare what they were sent."""

    def copy(self) -> "StepInput":
        """A step of the same fields. `dataclasses.replace` takes several times as long."""
        return StepInput(*_fields_of(self))


_fields_of = attrgetter(*(one.name for one in fields(StepInput)))


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log-probabilities of one request: of its sampled tokens and of prompt tokens; None where the
    request does not ask for them.
    """

    sampled: LogprobRows | None
    prompt: LogprobRows | None


@dataclass(slots=True)  # see StepInput
class StepOutput:
    """The output of a step. Requests are named by their index in it."""

    generation: int
    step: int
    num_tokens: Int32Array
    """Tokens of each request."""
    token_ids: Int32Array
    """The tokens, concatenated."""
    logprobs: dict[int, RequestLogprobs] = field(default_factory=dict)
    nan_requests: Int32Array = field(default_factory=no_ints)
    """Requests whose logits held NaN."""
    refused_tokens: dict[int, int] = field(default_factory=dict)
    """Which of a request's tokens is the first that its grammar refuses."""
    grammar_errors: dict[int, str] = field(default_factory=dict)
    """Why the grammar of such a request failed, if it did."""
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Vectors of the requests whose prompt the step computed to its end."""
    waited_nanos: int = 0
    """Time for which the step waited for the pipeline stage before."""
    ended_tier_loads: tuple[EndedTierLoad, ...] = ()
    """Loads that ended since the step before."""
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
    """Drafts that the step verified of each request; empty if it verified none."""
