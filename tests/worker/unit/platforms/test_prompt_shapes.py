"""The shapes of the steps that warm a worker up and measure memory before the first request."""

from dataclasses import replace
from pathlib import Path

import torch

from services.worker.core.batch.input_batch import BatchLimits
from services.worker.platforms.prompt_shapes import (
    PromptShape,
    every_shape,
    first_shapes,
    profiled_shapes,
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
    assert every_shape(LIMITS) == decodes + shapes((5, 12), (3, 16), (2, 16), (1, 16))


def test_short_chunks_make_more_lanes_than_their_tokens_fill() -> None:
    """33 chunks of 31 tokens fit into the token budget. Each is cut into two lanes of up to 16."""
    many = replace(LIMITS, max_num_seqs=64, max_num_batched_tokens=1024)
    chunks = [shape for shape in every_shape(many) if shape.num_tokens > 1]
    assert chunks[:2] == shapes((33, 31), (33, 16))


def test_chunks_follow_what_the_widest_window_sees() -> None:
    windowed = replace(LIMITS, windows=(7, None, 20))
    assert every_shape(windowed)[4:] == [
        PromptShape(5, 12, 20),
        PromptShape(3, 16, 20),
        PromptShape(2, 16, 20),
        PromptShape(1, 16, 20),
    ]


def test_steps_of_decodes_and_the_largest_of_prompts_take_the_most_memory() -> None:
    assert profiled_shapes(LIMITS) == shapes((5, 1), (4, 1), (2, 1), (1, 1), (5, 12))


def test_the_first_steps_on_the_cpu_are_a_prompt_a_chunk_and_a_decode() -> None:
    first, chunk, decode = PromptShape(1, 19), PromptShape(1, 20, 19), PromptShape(1, 1, 39)
    assert first_shapes(LIMITS) == [first, chunk, decode]
    assert first_shapes(replace(LIMITS, max_model_len=1)) == [PromptShape(1, 1), PromptShape(1, 1)]


def test_a_cache_of_one_block_is_enough_to_run_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    runner = build_runner(
        tmp_path,
        num_blocks=2,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        keeps_tokens_on_device=True,
    )
    windowed = replace(LIMITS, windows=(20,))
    of_limits = [*first_shapes(LIMITS), *every_shape(LIMITS), *profiled_shapes(LIMITS)]
    for shape in [*of_limits, *every_shape(windowed)]:
        run_prompts(runner, LIMITS, shape)
