"""Multiplication by a fixed weight in C++: see cpp/linear.cpp."""

import ctypes

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.kernels import Activation, Linear
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import EPILOGUES, Functions, Projection


class NativeLinear:
    """See Linear; with an activation, see Kernels.gated_linear."""

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
        width = functions.panel_width
        packed = (-(-rows // width), width, self.in_features)
        self._packed = memory.take(packed, weight.dtype)
        self._bias = None if bias is None else bias.contiguous()
        shape = (rows, self.in_features, EPILOGUES[activation])
        functions.pack_weight(weight.contiguous().data_ptr(), self._packed.data_ptr(), *shape)
        self._project, self._project_full = functions.project, functions.project_full
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.projection = Projection(self._packed.data_ptr(), bias_address, *shape)
        self._reference = ctypes.byref(self.projection)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        output = torch.empty((len(x), self.out_features), dtype=x.dtype)
        self._project(self._reference, x.data_ptr(), output.data_ptr(), len(x))
        return output

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear. The library sums in float32, and here it does not round."""
        output = torch.empty((len(x), self.out_features), dtype=torch.float32)
        self._project_full(self._reference, x.data_ptr(), output.data_ptr(), len(x))
        return output


class OddDepthLinear:
    """A Linear in bfloat16 of odd depth. Panels hold pairs along the depth, so the weight and the
    inputs get a column of zeros.
    """

    def __init__(
        self,
        functions: Functions,
        memory: LargePages,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        self._even: Linear = NativeLinear(functions, memory, _padded(weight), bias, activation)
        self.in_features = weight.shape[1]
        self.out_features = self._even.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._even(_padded(x))

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._even.full(_padded(x))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 1))
