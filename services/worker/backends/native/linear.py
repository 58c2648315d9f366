"""Multiplication by a fixed weight in C++: see cpp/linear.h."""

import ctypes

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.kernels import Activation
from services.worker.backends.lora import Delta
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import EPILOGUES, Functions, Projection
from services.worker.backends.native.lora import NativeDelta


class NativeLinear:
    """See Linear; with an activation, see Kernels.gated_linear.

    Panels in bfloat16 hold pairs along the depth, so a weight of odd depth and its inputs get a
    column of zeros; `is_padded` then.
    """

    def __init__(
        self,
        functions: Functions,
        memory: LargePages,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        rows, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_features = rows if activation is None else rows // 2
        self.is_padded = self.dtype is torch.bfloat16 and self.in_features % 2 == 1
        filled = (F.pad(weight, (0, 1)) if self.is_padded else weight).contiguous()
        depth, width = filled.shape[1], functions.panel_width
        self._packed = memory.take((-(-rows // width), width, depth), weight.dtype)
        self._bias = None if bias is None else bias.contiguous()
        shape = (rows, depth, EPILOGUES[activation])
        functions.pack_weight(filled.data_ptr(), self._packed.data_ptr(), *shape)
        self._project, self._project_full = functions.project, functions.project_full
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.projection = Projection(self._packed.data_ptr(), bias_address, *shape)
        self._reference = ctypes.byref(self.projection)

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        output = torch.empty((len(x), self.out_features), dtype=x.dtype)
        filled = F.pad(x, (0, 1)) if self.is_padded else x
        added = delta.structure if isinstance(delta, NativeDelta) else None
        self._project(self._reference, filled.data_ptr(), output.data_ptr(), len(x), added)
        return output

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear. The library sums in float32, and here it does not round."""
        output = torch.empty((len(x), self.out_features), dtype=torch.float32)
        filled = F.pad(x, (0, 1)) if self.is_padded else x
        self._project_full(self._reference, filled.data_ptr(), output.data_ptr(), len(x), None)
        return output
