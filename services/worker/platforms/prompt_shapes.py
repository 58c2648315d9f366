"""Runs steps of given shapes before the first request, to measure memory and to compile kernels.

On a GPU, attention computes lanes: a lane is one decode, or a few tokens of a chunk.
"""

from dataclasses import dataclass

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.backends.cuda.sub_chunks import MOST_QUERIES, bucket
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import StepRunner

_SAMPLING = SamplingParams(temperature=1, top_p=0.9)
"""The sampling parameters that cause the most work on a device."""

_FIRST_TOKENS = 256
"""Maximum length of the first prompt. It is enough to use every weight and kernel."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A step of new requests, each of which computes `num_tokens` after `num_computed` tokens."""

    num_requests: int
    num_tokens: int
    num_computed: int = 0


def profiled_shapes(limits: BatchLimits) -> list[PromptShape]:
    """Returns the steps that need the most memory: decode steps, which the device may record, then
    the step with the most tokens and sampled rows.
    """
    tokens = limits.max_num_batched_tokens
    num_requests = max(min(limits.max_num_seqs, tokens // 2), 1)
    each = min(tokens // num_requests, limits.max_model_len)
    decodes = _decodes(limits)
    return decodes if each < 2 else [*decodes, PromptShape(num_requests, each)]


def first_shapes(limits: BatchLimits) -> list[PromptShape]:
    """Returns three steps of one request: a prompt, a second chunk of it, and a decode."""
    prompt = min(_FIRST_TOKENS, limits.max_num_batched_tokens, limits.max_model_len - 1)
    first = max(prompt // 2, 1)
    shapes = PromptShape(1, first), PromptShape(1, prompt - first, first), PromptShape(1, 1, prompt)
    return [shape for shape in shapes if shape.num_tokens > 0]


def every_shape(limits: BatchLimits) -> list[PromptShape]:
    """Returns steps that together use every kernel. A kernel is compiled for a number of lanes.

    The largest steps are first, so that smaller steps can be recorded in the memory of larger ones.
    If layers have attention windows, each chunk has as many computed tokens before it as the widest
    window, because such chunks use additional kernels.
    """
    buckets = _powers_of_two(bucket(limits.max_num_batched_tokens))
    chunks = [_chunks(num_lanes, limits) for num_lanes in buckets]
    return [*_decodes(limits), *(shape for shape in chunks if shape is not None)]


def run_prompts(runner: StepRunner, limits: BatchLimits, shape: PromptShape) -> None:
    """Runs a step over an empty batch, then empties the batch. All tokens are stored in block 1."""
    length = shape.num_computed + shape.num_tokens
    tables = tuple(np.ones(-(-length // size), np.int32) for size in limits.block_sizes)
    count = shape.num_requests
    runner.execute(
        StepInput(
            generation=0,
            step=0,
            rows=np.arange(count, dtype=np.int32),
            num_scheduled_tokens=np.full(count, shape.num_tokens, np.int32),
            num_computed_tokens=np.full(count, shape.num_computed, np.int32),
            new_requests=tuple(
                NewRequest(row, np.zeros(length, np.int32), length, _SAMPLING, tables)
                for row in range(count)
            ),
            last_token_ids=np.zeros(count, np.int32),
        )
    )
    runner.reset()


def _decodes(limits: BatchLimits) -> list[PromptShape]:
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    return [PromptShape(min(count, most), 1) for count in _powers_of_two(bucket(most))]


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in reversed(range(most.bit_length()))]


def _chunks(most_lanes: int, limits: BatchLimits) -> PromptShape | None:
    """Returns a step of chunks that needs more than half of `most_lanes` lanes and at most all of
    them, or None if the limits allow none. Each chunk has few tokens, so that the step needs many
    lanes.
    """
    fewest_lanes = most_lanes // 2 + 1
    for lanes_each in range(1, fewest_lanes + 1):
        num_requests = -(-fewest_lanes // lanes_each)
        fewest = max(MOST_QUERIES * (lanes_each - 1) + 1, 2)
        within_step = limits.max_num_batched_tokens // num_requests
        most = min(MOST_QUERIES * lanes_each, within_step, limits.max_model_len)
        if num_requests <= limits.max_num_seqs and fewest <= most:
            widest = max((window for window in limits.windows if window is not None), default=0)
            return PromptShape(num_requests, most, min(widest, limits.max_model_len - most))
    return None
