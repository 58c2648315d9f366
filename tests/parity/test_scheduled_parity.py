"""Tokens are the same however the scheduler serves requests: with one step in flight or two, in
chunks, with prefix hits, and with a pool so small that requests are preempted again and again.
Scheduler, pool and runner are the real ones. They exchange the worker's messages without a
connection.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stepwell.common.v1 import common_pb2

from tests.parity.scheduled import generate
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    LARGE_POOL,
    SAMPLED,
    SITUATIONS,
    SMALL_POOL,
    reference_outputs,
)
from tests.tiny_models import ONE_OF_EACH, save_tiny_model
from tests.worker.runner_driver import build_runner


@dataclass(frozen=True)
class Served:
    """A kind of model, and the directory of a model of this kind."""

    kind: str
    directory: Path


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, request.param)
    return Served(request.param, directory)


async def test_greedy_output_is_that_of_transformers(served: Served) -> None:
    expected = reference_outputs(served.kind)
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    greedy = common_pb2.SamplingParams(**GREEDY)
    for name, situation in SITUATIONS.items():
        for async_scheduling in (False, True):
            run = await generate(runner, situation, greedy, async_scheduling=async_scheduling)
            assert run.outputs == situation.chosen(expected), f"{name}, async {async_scheduling}"
            assert (run.num_preemptions > 0) == (situation.num_blocks == SMALL_POOL)


async def test_sampled_output_is_the_same_in_every_case(served: Served) -> None:
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    sampling = common_pb2.SamplingParams(**SAMPLED)
    together = await generate(
        runner, SITUATIONS["sixteen together"], sampling, async_scheduling=False
    )
    assert len({token for output in together.outputs for token in output}) > 50
    for name, situation in SITUATIONS.items():
        for async_scheduling in (False, True):
            run = await generate(runner, situation, sampling, async_scheduling=async_scheduling)
            expected = situation.chosen(together.outputs)
            assert run.outputs == expected, f"{name}, async {async_scheduling}"
