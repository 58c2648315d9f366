"""Products of inputs and weights in 8 bits both (W8A8), which are exact until they are scaled.

Codes are multiplied as floats, in parts of the depth whose sums float32 holds exactly: in any order
and with any instructions they are the same. So a row's result does not depend on the rows beside
it, and differs from that of compiled kernels by the rounding of the bias alone.
"""

import torch

from services.worker.backends.lora import Delta
from services.worker.backends.quantized import QuantizedWeight, quantized_rows

_EXACT_DEPTH = 1024
"""So many products of codes, each at most 127 * 128, are less than 2**24."""


class CodedLinear:
    """See Linear, of a weight that quantizes its inputs. It takes any number of rows."""

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
        """See Linear."""
        codes, scales = quantized_rows(x)
        sums = torch.zeros(len(x), self.out_features, dtype=torch.int32, device=x.device)
        for part, weights in zip(torch.split(codes, _EXACT_DEPTH, 1), self._parts, strict=True):
            sums += (part @ weights).int()
        product = sums.float() * (self._scales * scales)
        return product if self._bias is None else product + self._bias
