"""One call of C++ computes all layers. It has the same tokens as separate calls for each operation,
with one thread and with two.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.random_model import Shape, write_model
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.backends.torch.kernels import TorchKernels
from tests.parity.exact import ExactModel, assert_same_bits
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

# A model that is large enough for two threads in a decode step.
SHAPE = Shape(512, 4, 8, 2, 1024, 600, tied_embeddings=True)
LENGTHS = (1, 7, 40, 150, 200, 33, 90, 300, 64)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_model(SHAPE, tmp_path)
    return tmp_path


def outputs(
    directory: Path, setting: KernelsSetting, num_threads: int, ranks: Ranks = ALONE
) -> list[list[int]]:
    """The output tokens of requests. Chunks of prompts share their steps with decodes."""
    torch.set_num_threads(num_threads)
    runner = build_runner(directory, num_blocks=200, kernels_setting=setting, ranks=ranks)
    random = np.random.default_rng(0)
    requests = [Request(random.integers(0, 600, length).tolist(), 10) for length in LENGTHS]
    Driver(runner, block_size=16, num_blocks=200).run(requests, chunk=50)
    return [request.output for request in requests]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("native", [torch.float32], indirect=True)
def test_results_do_not_depend_on_threads_or_on_fusing(directory: Path) -> None:
    expected = outputs(directory, KernelsSetting.TORCH, 1)
    assert len({tuple(output) for output in expected}) > 1
    assert outputs(directory, KernelsSetting.NATIVE, 1) == expected
    assert outputs(directory, KernelsSetting.NATIVE, 2) == expected


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("native", [torch.float32], indirect=True)
def test_results_do_not_depend_on_two_ranks_of_two_threads(directory: Path) -> None:
    expected = outputs(directory, KernelsSetting.TORCH, 1)
    native = KernelsSetting.NATIVE
    assert on_ranks(2, lambda t: outputs(directory, native, 2, t.ranks)) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_inside_the_call_are_the_bits_of_sums_between_operations(
    directory: Path, dtype: torch.dtype
) -> None:
    """Ranks with shared memory compute all layers in one call. With gloo, operations are calls."""
    tokens = np.random.default_rng(1).integers(0, 600, 300).tolist()

    def logits(thread: RankThread) -> torch.Tensor:
        model = ExactModel(directory, dtype, KernelsSetting.NATIVE, thread.ranks)
        return model.reference(tokens)

    shared, connected = on_ranks(2, logits), on_ranks(2, logits, kernels=TorchKernels())
    for actual in shared:
        assert_same_bits(actual, connected[0], "shared memory")
