"""Which steps are run before anybody asks for one, and that a runner runs them."""

from pathlib import Path

import torch

from services.worker.core.batch import BatchLimits
from services.worker.core.prompt_shapes import (
    PromptShape,
    every_shape,
    largest_shapes,
    run_prompts,
)
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import build_runner

LIMITS = BatchLimits(
    max_num_seqs=5,
    max_model_len=40,
    max_num_batched_tokens=64,
    vocab_size=320,
    block_size=16,
    num_blocks=2,
)


def shapes(*pairs: tuple[int, int]) -> list[PromptShape]:
    return [PromptShape(*pair) for pair in pairs]


def test_every_power_of_two_of_decodes_and_of_lanes_of_chunks() -> None:
    decodes = shapes((5, 1), (4, 1), (2, 1), (1, 1))
    assert every_shape(LIMITS) == decodes + shapes((2, 32), (1, 32), (1, 16))


def test_the_largest_steps_in_tokens_and_in_sampled_rows() -> None:
    assert largest_shapes(LIMITS) == shapes((5, 1), (5, 12))


def test_a_cache_of_one_block_is_enough_to_run_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    runner = build_runner(
        tmp_path, num_blocks=2, max_num_seqs=5, max_num_batched_tokens=64, runs_ahead=True
    )
    for shape in [*every_shape(LIMITS), *largest_shapes(LIMITS)]:
        run_prompts(runner, LIMITS, shape)
