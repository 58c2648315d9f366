"""The operations in plain torch, on every device. Compiled kernels are tested against them."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionShape, PagedAttention
from services.worker.backends.choices import Activation, SumOrder
from services.worker.backends.kernels import DecoderConstants, DecoderWeights, FusedDecoder, Linear
from services.worker.backends.lora import LoraLayer, LoraRows, LoraShape, LoraStep, PackedLora
from services.worker.backends.quantized import QuantizedWeight, Weight
from services.worker.backends.ranks import SharedRanks
from services.worker.backends.row_sampler import RowSampler
from services.worker.backends.torch.gating import GatedLinear
from services.worker.backends.torch.lora import TorchLora, TorchLoraStep
from services.worker.backends.torch.packed_linear import CodedLinear, PackedLinear, padded_rows
from services.worker.backends.torch.paged_attention import TorchPagedAttention, workspace_bytes


def torch_has_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices quickly on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchKernels:
    """Kernels in torch. With `batch_invariant`, a token's results on the CPU have the same bits
    whatever other tokens are in the step. This makes decode steps slower.
    """

    def __init__(self, *, batch_invariant: bool = True) -> None:
        self._batch_invariant = batch_invariant

    @property
    def description(self) -> str:
        return f"torch, {'' if self._batch_invariant else 'not '}batch-invariant"

    @property
    def bfloat16_order(self) -> SumOrder:
        return SumOrder.PAIRS

    def padded_rows(self, num_rows: int) -> int:
        return self.padded_torch_rows(num_rows)

    def padded_torch_rows(self, num_rows: int) -> int:
        return padded_rows(num_rows, batch_invariant=self._batch_invariant)

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Creates a projection. A weight is dequantized, unless its inputs are quantized too."""
        if isinstance(weight, QuantizedWeight):
            if weight.quantizes_inputs:
                return CodedLinear(weight, bias)
            weight = weight.dequantized()
        return self._plain_linear(weight, bias)

    def _plain_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return PackedLinear(weight, bias, batch_invariant=self._batch_invariant)

    def gated_linear(
        self, weight: Weight, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        projection = self.linear(weight, bias)
        return GatedLinear(projection, activation, batch_invariant=self._batch_invariant)

    @property
    def has_bfloat16(self) -> bool:
        return torch_has_bfloat16()

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        return False

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Converts x to the weight's data type, because torch warns if the data types differ."""
        if x.dtype is weight.dtype:
            return F.rms_norm(x, weight.shape, weight, epsilon)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(update), weight, epsilon)

    def fused_decoder(
        self, weights: DecoderWeights, constants: DecoderConstants
    ) -> FusedDecoder | None:
        """Returns None, because layers are computed operation by operation."""
        return None

    def shared_ranks(self, rank: int, size: int, timeout_seconds: float) -> SharedRanks | None:
        return None

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> PackedLora:
        return TorchLora(layers, lambda weight: self.linear(weight, None))

    def lora_step(self, rows: LoraRows) -> LoraStep:
        return TorchLoraStep(rows, self.padded_rows)

    def row_sampler(self) -> RowSampler | None:
        return None

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        return TorchPagedAttention(shape, batch_invariant=self._batch_invariant)

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        return workspace_bytes(shape, max_model_len)
