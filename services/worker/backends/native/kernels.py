"""The operations in C++, for processors with AVX2 (float32) or AVX-512 BF16 (bfloat16).

A weight is packed into panels that are read as sequential streams, whatever the number of rows, so
that no rows are padded. Small work stays in the calling thread: see cpp/threads.h. A row's result
is the same bits for any other rows in the batch and any number of threads.
"""

import ctypes

import torch

from services.worker.backends.attention import AttentionShape, PagedAttention
from services.worker.backends.kernels import (
    Activation,
    DecoderConstants,
    DecoderWeights,
    FusedDecoder,
    Linear,
)
from services.worker.backends.native.decoder import fused_decoder
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import functions_by_dtype
from services.worker.backends.native.linear import NativeLinear, OddDepthLinear
from services.worker.backends.native.paged_attention import NativePagedAttention, workspace_bytes
from services.worker.backends.torch.kernels import TorchKernels


class NativeKernels:
    """See Kernels. Data types that the library has no functions for are computed by torch's
    kernels, `batch_invariant` or not; the library's own functions always are.
    """

    def __init__(self, library: ctypes.CDLL, *, batch_invariant: bool = True) -> None:
        self._functions = functions_by_dtype(library)
        self._torch = TorchKernels(batch_invariant=batch_invariant)
        self._memory = LargePages()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The data types that the library computes in."""
        return tuple(self._functions)

    def padded_rows(self, num_rows: int) -> int:
        """See Kernels."""
        return num_rows

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See Kernels."""
        functions = self._functions.get(weight.dtype)
        if functions is None:
            return self._torch.linear(weight, bias)
        return _kind_for(weight)(functions, self._memory, weight, bias)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """See Kernels."""
        functions = self._functions.get(weight.dtype)
        if functions is None:
            return self._torch.gated_linear(weight, bias, activation)
        return _kind_for(weight)(functions, self._memory, weight, bias, activation)

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """See Kernels. The library takes norms in float32 with every data type."""
        return weight.float()

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:  # noqa: ARG002
        """See Kernels."""
        return False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See Kernels."""
        functions = self._functions.get(x.dtype)
        if functions is None:
            return self._torch.rms_norm(x, weight, epsilon)
        output = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        group = x.shape[1] if x.dim() > 2 else 1
        rows = len(x) * group
        functions.rms_norm(
            *(x.data_ptr(), group, x.stride(0), None, weight.data_ptr(), output.data_ptr()),
            *(rows, width, epsilon),
        )
        return output

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """See Kernels."""
        functions = self._functions.get(residual.dtype)
        if functions is None:
            return self._torch.add_rms_norm(residual, update, weight, epsilon)
        output = torch.empty(residual.shape, dtype=residual.dtype)
        rows, width = residual.shape
        functions.rms_norm(
            *(residual.data_ptr(), 1, width, update.data_ptr(), weight.data_ptr()),
            *(output.data_ptr(), rows, width, epsilon),
        )
        return output

    def fused_decoder(
        self, weights: DecoderWeights, constants: DecoderConstants
    ) -> FusedDecoder | None:
        """See Kernels."""
        return fused_decoder(self._functions, weights, constants)

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        """See Kernels."""
        functions = self._functions.get(shape.dtype)
        if functions is None:
            return self._torch.paged_attention(shape)
        return NativePagedAttention(functions, self._memory, shape)

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        """See Kernels."""
        if shape.dtype not in self._functions:
            return self._torch.attention_bytes(shape, max_model_len)
        return workspace_bytes(shape, max_model_len)


def _kind_for(weight: torch.Tensor) -> type[NativeLinear | OddDepthLinear]:
    is_odd = weight.dtype is torch.bfloat16 and weight.shape[1] % 2
    return OddDepthLinear if is_odd else NativeLinear
