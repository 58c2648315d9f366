"""Measures the machine's limits: arithmetic by the kernels, and reads of memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.cli.doctor.report import Fact
from services.worker.backends.kernels import Kernels

_GEMM = (512, 1536, 3072)
"""Rows, depth and columns of the measured matrix product."""
_STREAM_BYTES = 3 * 2**27
"""The bytes that measure the bandwidth, more than the caches of most processors can store."""
_DEPTH = 3072
_SECONDS = 0.4
"""Seconds for which a measurement is repeated. The fastest repetition counts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Arithmetic operations per second for each data type, and bytes read per second."""

    flops: dict[torch.dtype, float]
    bytes_per_second: float

    def facts(self) -> list[Fact]:
        gigabytes = self.bytes_per_second / 1e9
        return [
            *(
                Fact(
                    str(dtype)[6:], {"gflops": round(flops / 1e9, 1)}, f"{flops / 1e9:.0f} GFLOP/s"
                )
                for dtype, flops in self.flops.items()
            ),
            Fact("memory", {"gb_per_s": round(gigabytes, 1)}, f"{gigabytes:.1f} GB/s read"),
        ]


def measure_limits(kernels: Kernels) -> Limits:
    """Measures with torch's number of threads. The bandwidth is the better result of two
    operations: a sum, and a matrix product with one row, which reads the weight once.
    """
    flops = {dtype: _flops(kernels, dtype) for dtype in (torch.float32, torch.bfloat16)}
    floats = torch.ones(_STREAM_BYTES // 4)
    weight = floats.view(-1, _DEPTH)
    linear, row = kernels.linear(weight, None), _rows(kernels, 1, _DEPTH, torch.float32)
    seconds = min(fastest(floats.sum), fastest(lambda: linear(row)))
    return Limits(flops, _STREAM_BYTES / seconds)


def fastest(work: Callable[[], object]) -> float:
    """Repeats `work` for `_SECONDS`, at least twice. Returns the shortest duration in seconds."""
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(taken) < 2 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _flops(kernels: Kernels, dtype: torch.dtype) -> float:
    num_rows, depth, columns = _GEMM
    linear = kernels.linear(torch.randn(columns, depth).to(dtype), None)
    x = _rows(kernels, num_rows, depth, dtype)
    return 2 * len(x) * depth * columns / fastest(lambda: linear(x))


def _rows(kernels: Kernels, num_rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(kernels.padded_rows(num_rows), depth).to(dtype)
