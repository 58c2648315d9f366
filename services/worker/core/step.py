"""Input and output of one engine step, as the runner uses them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common.pooling import PoolingParams
from services.common.prompt_embeds import PromptEmbeds
from services.common.sampling import SamplingParams
from services.worker.sampling.logprobs import LogprobRows

Int32Array = npt.NDArray[np.int32]


def no_ints() -> Int32Array:
    """An empty array."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the batch: its known tokens, and its block tables by group.

    Its first `num_placeholders` tokens are placeholders for embeddings. `prompt_embeds` holds those
    of the last of them; embeddings of tokens that are computed already may be left out. `pooling`
    is how its prompt is pooled, where the model does that. `adapter_digest`: of the files of its
    adapter; empty if it has none. `cache_key`: see block_hash.cache_key.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: tuple[Int32Array, ...]
    prompt_embeds: PromptEmbeds | None = None
    num_placeholders: int = 0
    pooling: PoolingParams | None = None
    adapter_digest: bytes = b""
    cache_key: bytes = b""


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


@dataclass(frozen=True, slots=True)
class StepInput:
    """A difference to the batch, and the tokens to compute.

    Applied in this order: `removed_rows` are freed, `new_requests` enter, blocks are appended to
    tables, `tier_stores` are copied to the tier, `tier_loads` begin, `block_ids_to_zero` are
    cleared in all layers, blocks are copied in all layers, one after the other from
    `copy_sources[i]` to `copy_targets[i]`, the tokens of `rows` are computed.
    `num_scheduled_tokens`, `num_computed_tokens` and `num_draft_tokens` are parallel to `rows`; the
    last is empty if the step has no drafts. Draft tokens are the last of a request's scheduled
    tokens, -1 where they are to be proposed here; see drafter.py. `last_token_ids` is parallel too,
    or empty: the last of each request's scheduled tokens, for pipeline stages that do not sample.
    If the generation is another than that of the step before, batch and cache start empty.
    """

    generation: int
    step: int
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    removed_rows: Int32Array = field(default_factory=no_ints)
    new_requests: tuple[NewRequest, ...] = ()
    appended_blocks: tuple[AppendedBlocks, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
    draft_token_ids: Int32Array = field(default_factory=no_ints)
    block_ids_to_zero: Int32Array = field(default_factory=no_ints)
    copy_sources: Int32Array = field(default_factory=no_ints)
    copy_targets: Int32Array = field(default_factory=no_ints)
    last_token_ids: Int32Array = field(default_factory=no_ints)
    tier_stores: TierBlocks | None = None
    tier_loads: tuple[TierLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log-probabilities of one request: of its sampled tokens and of prompt tokens; None where the
    request does not ask for them.
    """

    sampled: LogprobRows | None
    prompt: LogprobRows | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a step, in the order of its requests.

    `num_tokens[i]` of the concatenated `token_ids` belong to request i. `logprobs`: by index of the
    request. `nan_requests`: indexes of requests whose logits held NaN. `refused_tokens`: by index
    of the request, which of its tokens is the first that its grammar refuses. `grammar_errors`: of
    these requests, by index, why the grammar of some failed. `pooled`: vectors, float32, of the
    requests whose prompt the step computed to its end, by index. `waited_nanos`: for how long it
    waited for the pipeline stage before. `ended_tier_loads`: those that ended since the step
    before. `num_draft_tokens`: drafts that it verified of each request; empty if none.
    """

    generation: int
    step: int
    num_tokens: Int32Array
    token_ids: Int32Array
    logprobs: dict[int, RequestLogprobs] = field(default_factory=dict)
    nan_requests: Int32Array = field(default_factory=no_ints)
    refused_tokens: dict[int, int] = field(default_factory=dict)
    grammar_errors: dict[int, str] = field(default_factory=dict)
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    waited_nanos: int = 0
    ended_tier_loads: tuple[EndedTierLoad, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=no_ints)
