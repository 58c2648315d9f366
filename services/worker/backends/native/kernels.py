"""The operations in C++, for processors with AVX2 or NEON, in float32 and bfloat16.

A weight is packed into panels (blocks of output columns). Panels are read sequentially for any
number of rows, so rows are not padded. Small work stays in the calling thread (see cpp/threads.h).
The bits of a row's result do not depend on the other rows in the batch or on the number of threads.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch

from services.worker.backends.attention import AttentionShape, PagedAttention
from services.worker.backends.choices import Activation, SumOrder
from services.worker.backends.kernels import DecoderConstants, DecoderWeights, FusedDecoder, Linear
from services.worker.backends.lora import LoraLayer, LoraRows, LoraShape, LoraStep, PackedLora
from services.worker.backends.native.decoder import fused_decoder
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import Functions, functions_by_dtype
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.lora import NativeLora, NativeLoraStep
from services.worker.backends.native.paged_attention import (
    NativePagedAttention,
    has_whole_cells,
    workspace_bytes,
)
from services.worker.backends.native.row_sampler import NativeRowSampler
from services.worker.backends.native.shared_ranks import NativeRanks
from services.worker.backends.quantized import Weight
from services.worker.backends.torch.kernels import TorchKernels


class NativeKernels(TorchKernels):
    """Kernels in C++. They are always batch-invariant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(batch_invariant=True)
        self._functions = functions_by_dtype(library)
        self._row_sampler = NativeRowSampler(library)
        self._library = library
        self._memory = LargePages()

    @property
    def description(self) -> str:
        return f"native, bfloat16 in the order of {self.bfloat16_order.value}"

    @property
    def has_bfloat16(self) -> bool:
        return True

    @property
    def bfloat16_order(self) -> SumOrder:
        return list(SumOrder)[int(self._library.bfloat16_order())]

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        return NativeLinear(self._functions[weight.dtype], self._memory, weight, bias)

    def gated_linear(
        self, weight: Weight, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        return NativeLinear(self._functions[weight.dtype], self._memory, weight, bias, activation)

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in float32, which the library expects with every data type."""
        return weight.float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return _normalized(self._functions[x.dtype], x, None, weight, epsilon)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return _normalized(self._functions[residual.dtype], residual, update, weight, epsilon)

    def fused_decoder(
        self, weights: DecoderWeights, constants: DecoderConstants
    ) -> FusedDecoder | None:
        return fused_decoder(self._functions, weights, constants)

    def shared_ranks(self, rank: int, size: int, timeout_seconds: float) -> NativeRanks:
        return NativeRanks(self._library, rank, size, timeout_seconds)

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> PackedLora:
        return NativeLora(layers, shapes, self._functions[dtype].panel_width)

    def lora_step(self, rows: LoraRows) -> LoraStep:
        return NativeLoraStep(rows)

    def row_sampler(self) -> NativeRowSampler:
        return self._row_sampler

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        if not has_whole_cells(shape):
            return super().paged_attention(shape)
        return NativePagedAttention(self._functions[shape.dtype], self._memory, shape)

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        if not has_whole_cells(shape):
            return super().attention_bytes(shape, max_model_len)
        return workspace_bytes(shape, max_model_len)


def _normalized(
    functions: Functions,
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Normalizes x [n, d] or [n, m, d]. If there is an update, first adds it to x in place."""
    output = torch.empty(x.shape, dtype=x.dtype)
    group = x.shape[1] if x.dim() > 2 else 1
    added = None if update is None else update.data_ptr()
    functions.rms_norm(
        *(x.data_ptr(), group, x.stride(0), added, weight.data_ptr(), output.data_ptr()),
        *(len(x) * group, x.shape[-1], epsilon),
    )
    return output
