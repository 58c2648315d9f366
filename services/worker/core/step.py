"""One engine step, in and out, as the runner sees it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common.prompt_embeds import PromptEmbeds
from services.common.sampling import SamplingParams
from services.worker.sampling.sampler import LogprobRows

Int32Array = npt.NDArray[np.int32]


def no_ints() -> Int32Array:
    """An empty array."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the batch, whole: known tokens, and its block tables by group.

    Its first `num_placeholders` tokens stand for embeddings, of which `prompt_embeds` has the last
    ones; those of tokens that are computed already are left out.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingParams
    block_tables: tuple[Int32Array, ...]
    prompt_embeds: PromptEmbeds | None = None
    num_placeholders: int = 0


@dataclass(frozen=True, slots=True)
class AppendedBlocks:
    """Growth of tables in one group: `num_blocks[i]` of the concatenated ids to `rows[i]`."""

    rows: Int32Array
    num_blocks: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class StepInput:
    """A difference to the batch, and what to compute of it.

    Order of effect: `removed_rows` leave, `new_requests` enter, tables grow, `block_ids_to_zero`
    are cleared in all layers, `rows` compute. `num_scheduled_tokens`, `num_computed_tokens` and
    `num_draft_tokens` are parallel to `rows`; the last is empty when the step has no drafts. Draft
    tokens are the last of a request's scheduled tokens. Another generation than the step before:
    batch and cache start empty.
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


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log-probabilities of one request: of its sampled tokens, of prompt tokens; None unasked."""

    sampled: LogprobRows | None
    prompt: LogprobRows | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, in the order of its requests.

    `num_tokens[i]` of the concatenated `token_ids` belong to request i. `logprobs` by index of the
    request. `nan_requests`: indexes whose logits held NaN.
    """

    generation: int
    step: int
    num_tokens: Int32Array
    token_ids: Int32Array
    logprobs: dict[int, RequestLogprobs] = field(default_factory=dict)
    nan_requests: Int32Array = field(default_factory=no_ints)
