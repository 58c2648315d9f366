"""With windows of any length, greedy output equals transformers'. Chunks begin inside blocks and
windows. Requests are preempted repeatedly, and resume with their cached blocks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from stepwell.common.v1 import common_pb2

from tests.parity.oracle import first_choices
from tests.parity.scheduled import generate
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    LARGE_POOL,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Situation,
    prompts,
)
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import build_runner

WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {},
    "gemma4_moe": {},
    "mistral_window": {},
    "mixtral": {},
    "qwen2_window": {},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True},
    "starcoder2": {},
}
"""A kind of model for each architecture with windows, and changes to its configuration."""

WINDOWS = {
    "shorter than the prompt": 6,
    "longer than the prompt, shorter than with its output": 50,
    "longer than everything": MAX_TOKENS + 50,
}
NUM_BLOCKS = 24
"""The number of blocks of each KV-cache group."""


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", WINDOWED)
async def test_greedy_output_is_that_of_transformers(
    kind: str, window: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    changes = {**WINDOWED[kind], "sliding_window": window}
    model = save_tiny_model(tmp_path, kind, **changes)
    runner = build_runner(tmp_path, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    assert window in runner.limits.windows
    run = await generate(
        runner,
        Situation(num_blocks=NUM_BLOCKS, max_num_batched_tokens=23),
        common_pb2.SamplingParams(**GREEDY),
        async_scheduling=True,
    )
    for prompt, output in zip(prompts(), run.outputs, strict=True):
        assert output == first_choices(model, prompt, output)
    assert run.num_preemptions > 0
    assert run.num_cached_tokens > 0


def test_windows_are_as_long_as_they_say() -> None:
    longest = max(map(len, prompts()))
    short, middle, long = WINDOWS.values()
    assert short < longest < middle < longest + MAX_TOKENS < long < MAX_MODEL_LEN
