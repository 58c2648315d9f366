"""All layers in one call: the same tokens with one thread, with two, and operation by operation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.random_model import Shape, write_model
from services.worker.platforms.cpu_kernels import KernelsSetting
from tests.worker.runner_driver import Driver, Request, build_runner

# Large enough for a decode to be worth two threads.
SHAPE = Shape(512, 4, 8, 2, 1024, 600, tied_embeddings=True)
LENGTHS = (1, 7, 40, 150, 200, 33, 90, 300, 64)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_model(SHAPE, tmp_path)
    return tmp_path


def outputs(directory: Path, setting: KernelsSetting, num_threads: int) -> list[list[int]]:
    """What requests get, prompts in chunks beside decodes."""
    torch.set_num_threads(num_threads)
    runner = build_runner(directory, num_blocks=200, kernels_setting=setting)
    random = np.random.default_rng(0)
    requests = [Request(random.integers(0, 600, length).tolist(), 10) for length in LENGTHS]
    Driver(runner, block_size=16, num_blocks=200).run(requests, chunk=50)
    return [request.output for request in requests]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("native", [torch.float32], indirect=True)
def test_threads_and_operations_make_no_difference(directory: Path) -> None:
    expected = outputs(directory, KernelsSetting.TORCH, 1)
    assert len({tuple(output) for output in expected}) > 1
    assert outputs(directory, KernelsSetting.NATIVE, 1) == expected
    assert outputs(directory, KernelsSetting.NATIVE, 2) == expected
