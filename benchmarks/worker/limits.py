"""The machine's limits, and the highest rates that they allow for a model."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.random_model import Shape, tensor_dims
from benchmarks.worker.loads import DECODE_LEVELS, PREFILL, decode_name

_GEMM = (512, 1536, 3072)
_STREAM_BYTES = 3 * 2**27
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits: arithmetic operations per second, and bytes read per second.

    Operations are in bfloat16, or in float32 if the processor has no bfloat16 instructions.
    """

    flops: float
    bytes_per_second: float

    def figures(self, shape: Shape) -> dict[str, float]:
        """Maps each load to the highest tokens per second that the limits allow for a model.

        The costs of attention and of the KV cache are ignored. A step reads every weight once. A
        tied embedding is read once, as the output head.
        """
        sizes = {name: math.prod(dims) for name, dims in tensor_dims(shape)}
        embedding = sizes["model.embed_tokens.weight"]
        layers = sum(size for name, size in sizes.items() if ".layers." in name)
        step_bytes = 2 * (layers + embedding)

        def decode(level: int) -> float:
            computing = 2 * level * (layers + embedding) / self.flops
            return level / max(step_bytes / self.bytes_per_second, computing)

        found = {decode_name(level): decode(level) for level in DECODE_LEVELS}
        return {PREFILL: self.flops / (2 * layers)} | found


class LimitProbe:
    """Measures the machine's limits repeatedly, with torch's current number of threads. Times a
    large matrix multiplication, and takes the fastest of three streaming reads of memory: a sum,
    the dot product of two halves, and a matrix times a vector.
    """

    def __init__(self) -> None:
        rows, depth, columns = _GEMM
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = torch.bfloat16 if has_bfloat16 else torch.float32
        x = torch.randn(rows, depth, dtype=dtype)
        weight = _packed(torch.randn(columns, depth, dtype=dtype))
        floats = torch.ones(_STREAM_BYTES // 4)
        num_rows = _STREAM_BYTES // dtype.itemsize // depth
        matrix = _packed(torch.ones(num_rows, depth, dtype=dtype))
        self._operations = 2 * rows * depth * columns
        self._multiply = lambda: _multiply(x, weight)
        self._streams: Sequence[Callable[[], object]] = (
            floats.sum,
            lambda: torch.dot(*floats.view(2, -1)),
            lambda: _multiply(x[:1], matrix),
        )
        self._found: list[Limits] = []

    def measure(self) -> None:
        """Measures both limits a few times, and stores the best values."""
        flops = self._operations / _best(self._multiply)
        self._found.append(Limits(flops, _STREAM_BYTES / min(map(_best, self._streams))))

    def best(self) -> Limits:
        """The maximum over all calls of `measure`."""
        return self._over(max)

    def median(self) -> Limits:
        """The median over all calls of `measure`."""
        return self._over(statistics.median)

    def _over(self, choose: Callable[[list[float]], float]) -> Limits:
        return Limits(
            choose([limits.flops for limits in self._found]),
            choose([limits.bytes_per_second for limits in self._found]),
        )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product


def _best(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)
