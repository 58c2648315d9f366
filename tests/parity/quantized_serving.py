"""Serves checkpoints with quantized weights. Compares their tokens with the tokens of a float32
model that has the same weights, and the bits of their logits between different steps.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from services.common.request.sampling import SamplingParams
from tests.parity.exact import ExactModel, drawn
from tests.parity.oracle import assert_served
from tests.tiny_models import VOCAB_SIZE
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

BLOCK_SIZE = 4
NUM_BLOCKS = 800
WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=3)
Checkpoint = tuple[Path, PreTrainedModel]
"""A checkpoint's directory, and a float32 model of transformers with the same weights."""


def serve(directory: Path, **options: object) -> list[Request]:
    """Serves four requests, with prompt lengths from 1, together in chunks of 7."""
    random = np.random.default_rng(7)
    served = [
        Request(random.integers(3, VOCAB_SIZE, 1 + 15 * number).tolist(), 8, WITH_LOGPROBS)
        for number in range(4)
    ]
    runner = build_runner(directory, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **options)
    Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS).run(served, chunk=7)
    return served


def assert_is_what_transformers_computes(checkpoint: Checkpoint, **options: object) -> None:
    directory, model = checkpoint
    for request in serve(directory, **options):
        assert_served(model, request)


def assert_logits_are_exact(model: ExactModel) -> None:
    """Asserts that a request's logits do not depend on the other requests in its steps."""
    sequences = [drawn(length, length, VOCAB_SIZE) for length in (1, 5, 33, 90)]
    for tokens in sequences:
        model.reference(tokens)
    for chunks in ([7], [16, 1, 90, 3]):
        requests = [Request(tokens, 1) for tokens in sequences]
        model.serving(seed=1).run(requests, chunks, f"chunks of {chunks}")


def assert_two_ranks_divide(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint

    def work(rank: RankThread) -> list[Request]:
        torch.set_num_threads(1)
        return serve(directory, ranks=rank.ranks)

    for served in on_ranks(2, work):
        for request in served:
            assert_served(model, request)
