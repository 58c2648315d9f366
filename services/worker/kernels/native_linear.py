"""Multiplication by a fixed weight in C++: see cpp/linear.cpp."""

import ctypes

import torch

from services.worker.kernels.interface import Activation
from services.worker.kernels.native import EPILOGUES, Functions, Projection


class NativeLinear:
    """See Linear; with an activation, see Kernels.gated_linear."""

    def __init__(
        self,
        functions: Functions,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        rows, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_features = rows if activation is None else rows // 2
        width = functions.panel_width
        self._packed = torch.empty(-(-rows // width) * width * self.in_features, dtype=weight.dtype)
        self._bias = None if bias is None else bias.contiguous()
        shape = (rows, self.in_features, EPILOGUES[activation])
        functions.pack_weight(weight.contiguous().data_ptr(), self._packed.data_ptr(), *shape)
        self._project = functions.project
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.projection = Projection(self._packed.data_ptr(), bias_address, *shape)
        self._reference = ctypes.byref(self.projection)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        rows = len(x)
        output = torch.empty((rows, self.out_features), dtype=x.dtype)
        self._project(self._reference, x.data_ptr(), output.data_ptr(), rows)
        return output
