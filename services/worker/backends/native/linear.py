"""Multiplication by a fixed weight in C++ (cpp/linear.h). Weights are packed into panels, which are
blocks of output columns (cpp/panel.h).
"""

import ctypes
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.choices import Activation
from services.worker.backends.lora import Delta
from services.worker.backends.native import library
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import Functions
from services.worker.backends.native.lora import NativeDelta
from services.worker.backends.quantized import QuantizedWeight, Weight

_INT4_BITS, _INT4_DEPTH = 4, 4
"""The bits of an INT4 code, and the number of elements of a column that are unpacked at once:
BLOCK_DEPTH in cpp/quantized.h.
"""


class NativeLinear:
    """A Linear in C++. With an activation it is a gated projection (see Kernels.gated_linear).

    Panels store several elements of a column side by side, such as pairs in bfloat16. If the number
    of input features is not a multiple of this number, weight and inputs are padded with columns of
    zeros, and `is_padded` is true.
    """

    def __init__(
        self,
        functions: Functions,
        memory: LargePages,
        weight: Weight,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        rows, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_features = rows if activation is None else rows // 2
        weight = _packable(weight)
        self._padding = -self.in_features % library.PAIRS[self.dtype]
        self._bias = None if bias is None else bias.contiguous()
        self._memory = memory
        bias_address = None if self._bias is None else self._bias.data_ptr()
        depth = self.in_features + self._padding
        epilogue = library.EPILOGUES[activation]
        self.projection = library.Projection(None, bias_address, rows, depth, epilogue)
        self._reference = ctypes.byref(self.projection)
        if isinstance(weight, QuantizedWeight):
            self._packed = self._pack_quantized(functions, weight)
        else:
            self.projection.format, self.projection.group = library.PLAIN, depth
            self._packed, filled = self._take(functions), self._filled(weight).contiguous()
            functions.pack_weight(self._reference, filled.data_ptr())
        self._project, self._project_full = functions.project, functions.project_full

    @property
    def is_padded(self) -> bool:
        return self._padding > 0

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        output = torch.empty((len(x), self.out_features), dtype=x.dtype)
        filled = self._filled(x)
        added = delta.structure if isinstance(delta, NativeDelta) else None
        self._project(self._reference, filled.data_ptr(), output.data_ptr(), len(x), added)
        return output

    def full(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty((len(x), self.out_features), dtype=torch.float32)
        filled = self._filled(x)
        self._project_full(self._reference, filled.data_ptr(), output.data_ptr(), len(x), None)
        return output

    def _pack_quantized(self, functions: Functions, weight: QuantizedWeight) -> torch.Tensor:
        codes = self._filled(weight.codes.view(torch.int8)).contiguous()
        scales = weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        of_codes = library.FORMATS[weight.codes.dtype, weight.bits]
        self.projection.format = library.W8A8 if weight.quantizes_inputs else of_codes
        self.projection.has_offsets = offsets is not None
        self.projection.group = codes.shape[1] // scales.shape[1]
        packed = self._take(functions)
        address = None if offsets is None else offsets.data_ptr()
        source = library.NativeQuantizedWeight(codes.data_ptr(), scales.data_ptr(), address)
        functions.pack_quantized(self._reference, source)
        return packed

    def _take(self, functions: Functions) -> torch.Tensor:
        num_panels = -(-self.projection.columns // functions.panel_width)
        size = num_panels, functions.panel_bytes(self._reference)
        packed = self._memory.take(size, torch.uint8)
        self.projection.packed = packed.data_ptr()
        return packed

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, self._padding)) if self._padding else x


def _packable(weight: Weight) -> Weight:
    """Returns the weight, or an equal weight that can be packed. If the group size is not a
    multiple of _INT4_DEPTH, 4-bit codes are stored in 8 bits. If the group size is not a multiple
    of the number of elements that panels store side by side, the weight is dequantized.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.bits == _INT4_BITS and weight.group % _INT4_DEPTH:
        weight = replace(weight, bits=2 * _INT4_BITS)
    has_groups = weight.scales.shape[1] > 1
    is_uneven = has_groups and weight.group % library.PAIRS[weight.dtype]
    return weight.dequantized() if is_uneven else weight
