"""Steps of given shapes, for what must be run or measured before anybody asks for it."""

from dataclasses import dataclass

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.attention.sub_chunks import MOST_QUERIES, bucket
from services.worker.core.batch import BatchLimits
from services.worker.core.runner import Runner
from services.worker.core.step import NewRequest, StepInput

_SAMPLING = SamplingParams(temperature=1, top_p=0.9)
"""What takes the most work of those that are sampled on a device."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A step of so many new requests, each of so many tokens."""

    num_requests: int
    num_tokens: int


def largest_shapes(limits: BatchLimits) -> list[PromptShape]:
    """The step with the most decodes, and the one with the most tokens, sampled in most rows."""
    tokens = limits.max_num_batched_tokens
    decodes = PromptShape(min(limits.max_num_seqs, tokens), 1)
    num_requests = max(min(limits.max_num_seqs, tokens // 2), 1)
    each = min(tokens // num_requests, limits.max_model_len)
    return [decodes] if each < 2 else [decodes, PromptShape(num_requests, each)]


def every_shape(limits: BatchLimits) -> list[PromptShape]:
    """Steps that between them need every kernel that is compiled for a number of lanes.

    The largest come first: what a device records of later ones fits into their memory.
    """
    tokens = limits.max_num_batched_tokens
    most = min(limits.max_num_seqs, tokens)
    decodes = [PromptShape(min(count, most), 1) for count in _powers_of_two(bucket(most))]
    chunks = [_chunks(MOST_QUERIES * lanes, limits) for lanes in _powers_of_two(tokens)]
    return [*decodes, *(shape for shape in chunks if shape is not None)]


def run_prompts(runner: Runner, limits: BatchLimits, shape: PromptShape) -> None:
    """Runs one step over an empty batch, and empties it. All its tokens share block 1."""
    table = np.ones(-(-shape.num_tokens // limits.block_size), np.int32)
    tables = (table,) * len(limits.windows)
    count = shape.num_requests
    runner.execute(
        StepInput(
            generation=0,
            step=0,
            slots=np.arange(count, dtype=np.int32),
            num_scheduled_tokens=np.full(count, shape.num_tokens, np.int32),
            num_computed_tokens=np.zeros(count, np.int32),
            new_requests=tuple(
                NewRequest(
                    slot,
                    np.zeros(shape.num_tokens, np.int32),
                    shape.num_tokens,
                    _SAMPLING,
                    tables,
                )
                for slot in range(count)
            ),
        )
    )
    runner.reset()


def _powers_of_two(most: int) -> list[int]:
    """Those up to `most`, falling."""
    return [1 << exponent for exponent in reversed(range(most.bit_length()))]


def _chunks(num_tokens: int, limits: BatchLimits) -> PromptShape | None:
    """So many tokens in as few requests as hold them; None where that is no step."""
    num_requests = -(-num_tokens // limits.max_model_len)
    if num_tokens > limits.max_num_batched_tokens or num_requests > limits.max_num_seqs:
        return None
    return PromptShape(num_requests, num_tokens // num_requests)
