"""Matrix multiplication by a fixed weight, packed for the processor where that is possible."""

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.kernels.interface import Activation

_BUCKETS = ((4, 1), (32, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Up to so many rows, multiples of so many."""


def padded_rows(num_rows: int) -> int:
    """The number of rows to multiply in place of `num_rows`: the next of few.

    oneDNN prepares, and keeps, a kernel with buffers of its own for each number of rows that it
    meets, at milliseconds and megabytes apiece. Up to 1024 rows there are 31 of these numbers.
    """
    for most, multiple in _BUCKETS:
        if num_rows <= most:
            return -(-num_rows // multiple) * multiple
    return -(-num_rows // 128) * 128


class PackedLinear:
    """x W^T + b for a weight [out, in] and a bias [out] or None.

    On the CPU the weight is reordered once into oneDNN's blocked layout, which about halves the
    time of small batches; where the library lacks the operation, the plain one runs. The instance
    owns its weight: in packed form the caller's tensor is not kept. Callers bring a number of rows
    that `padded_rows` gives.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        if self._packed is None:
            assert self._plain is not None
            return F.linear(x, self._plain, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear; the library rounds."""
        return self(x).float()


class GatedLinear:
    """A projection, and its gates applied to its values."""

    def __init__(self, projection: PackedLinear, activation: Activation) -> None:
        self._projection = projection
        self._activation = activation
        self.in_features = projection.in_features
        self.out_features = projection.out_features // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return gated(self._projection(x), self._activation)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear; the library rounds."""
        return self(x).float()


def gated(product: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Gates [n, d] beside the values [n, d] that they gate -> activation(gate) * value."""
    gate, up = product.chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            return F.silu(gate).mul_(up)
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh").mul_(up)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or weight.device.type != "cpu":
        return None
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    except (AttributeError, RuntimeError):
        return None
    return packed
