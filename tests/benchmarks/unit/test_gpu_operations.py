"""The GPU benchmark's comparisons of operations find no differences on a CPU."""

import torch

from benchmarks.gpu.operations import experts_difference, sampling_differences
from services.worker.backends.device import CpuDevice


def test_operations_of_a_device_are_those_of_the_host() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert experts_difference(CpuDevice(), torch.float32) < 1e-5
    others, largest = sampling_differences(CpuDevice())
    assert others == 0
    assert largest < 1e-4
