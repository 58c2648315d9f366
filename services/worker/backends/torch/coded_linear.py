"""Products of weights and inputs that are both in 8 bits (W8A8). The products of codes are exact.

Codes are multiplied as floats, in parts of the depth whose sums are exact in float32. So sums are
the same in any order and with any instructions. A row's result does not depend on other rows, and
differs from the compiled kernels' only by the rounding of the bias.
"""

import torch

from services.worker.backends.lora import Delta
from services.worker.backends.quantized import QuantizedWeight, quantized_rows

_EXACT_DEPTH = 1024
"""The sum of this many products of codes, each at most 127 * 128, is below 2**24."""


class CodedLinear:
    """A Linear for a weight that quantizes its inputs, for any number of rows."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._parts = [part.float().T for part in torch.split(weight.codes, _EXACT_DEPTH, dim=1)]
        self._scales = weight.scales.T
        self._bias = bias

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        product = self.full(x).to(x.dtype)
        return product if delta is None else delta.added_to(product, x)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantized_rows(x)
        sums = torch.zeros(len(x), self.out_features, dtype=torch.int32, device=x.device)
        for part, weights in zip(torch.split(codes, _EXACT_DEPTH, 1), self._parts, strict=True):
            sums += (part @ weights).int()
        product = sums.float() * (self._scales * scales)
        return product if self._bias is None else product + self._bias
