"""The interface of the operations that decoders call. An implementation determines how weights are
packed and how KV caches are laid out. Therefore layers do not depend on devices, instruction sets
or page layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.backends.attention import (
    AttentionShape,
    LayerAttention,
    PagedAttention,
    Rotation,
)
from services.worker.backends.choices import Activation, SumOrder
from services.worker.backends.lora import (
    NO_DELTAS,
    Delta,
    LayerDeltas,
    LoraLayer,
    LoraRows,
    LoraShape,
    LoraStep,
    PackedLora,
)
from services.worker.backends.quantized import Weight
from services.worker.backends.ranks import ALONE, Ranks, SharedRanks
from services.worker.backends.row_sampler import RowSampler


class Linear(Protocol):
    """Multiplication by a fixed weight [out, in], plus a fixed bias [out] if there is one."""

    out_features: int

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        """Maps [n, in] to [n, out]. n must be a result of `Kernels.padded_rows`. `delta` is what
        LoRA adapters add to the product before gates are applied.
        """

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32, if possible without first rounding it to x's data type."""


class Mlp(Protocol):
    """An MLP over the tokens of a step."""

    def __call__(
        self, hidden: torch.Tensor, num_tokens: int, deltas: LayerDeltas = NO_DELTAS
    ) -> torch.Tensor:
        """Maps [n, hidden_size] to [n, hidden_size]. Rows from `num_tokens` on are padding. Their
        outputs are finite if their inputs are. `deltas` is what LoRA adapters add to the
        projections.
        """


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The MLP down(activation(gate(x)) * up(x)), with a gated projection `gate_up`. Source:
    Shazeer, "GLU Variants Improve Transformer".
    """

    gate_up: Linear
    down: Linear

    def __call__(
        self, hidden: torch.Tensor, num_tokens: int, deltas: LayerDeltas = NO_DELTAS
    ) -> torch.Tensor:
        return self.down(self.gate_up(hidden, deltas.gate_up), deltas.down)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer: attention and an MLP, each after a norm.

    `query_norm` and `key_norm` [head_dim] are None without query-key norm. The output norms
    [hidden_size] are None if outputs are not normalized. From these fields, native/library.py
    creates the structure for the compiled library, with the fields of GatedMlp in place of `mlp`.
    """

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp
    mlp_output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder, or of one of its pipeline stages."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]. In pipeline stages after the first it has no rows."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None
    """The norm after the last layer. `norm` and `head` are None before the last pipeline stage."""
    head: Linear | None
    ranks: Ranks = ALONE
    """The ranks over which layers are divided. They sum the outputs of attention and of MLPs."""
    head_ranks: Ranks = ALONE
    """The ranks over which the head is divided, with equally many output columns on each."""


@dataclass(frozen=True, slots=True)
class DecoderConstants:
    """The numbers with which a decoder computes in addition to its weights."""

    embedding_scale: float
    rotations: tuple[Rotation, ...]
    """Cos and sin of all positions, for each distinct rotary embedding."""
    rotation_of: tuple[int, ...]
    """For each layer, the index of its rotation in `rotations`."""
    epsilon: float


class FusedDecoder(Protocol):
    """A decoder as one operation, from token ids to logits."""

    def accepts(self, attention: LayerAttention) -> bool:
        """Whether the decoder can run with this attention."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None,
        wanted: torch.Tensor | None,
        lora: LoraStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps token ids, int64 [n], to hidden states [n, hidden_size] and the logits, float32, of
        the tokens at the indexes `wanted` (see Model.forward). Hidden states are normalized if the
        decoder has a final norm. Without a head there are no logits. If `embedded` [n, hidden_size]
        is not None, it replaces the embeddings of the ids. `lora` has the LoRA adapters of the
        rows.
        """


class Kernels(Protocol):
    """Operations on tensors of the model's data type on the model's device.

    The rows of arguments are contiguous, one for each token. Results are new and contiguous unless
    the operation is documented otherwise.
    """

    @property
    def description(self) -> str:
        """A short name of the kernels for logs."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether the kernels compute in bfloat16 about as fast as in float32, or faster."""

    @property
    def bfloat16_order(self) -> SumOrder:
        """The order of the sums of bfloat16 products, on which the bits of results depend."""

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows to compute in place of `num_rows`: at least `num_rows`."""

    def padded_torch_rows(self, num_rows: int) -> int:
        """Like `padded_rows`, for operations that torch computes even if kernels are compiled."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Creates a projection. The weight is packed, and the caller's tensor is not kept. A
        quantized weight may be stored dequantized, rounded to the data type of the computation.
        Inputs are then not quantized.
        """

    def gated_linear(
        self, weight: Weight, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """Creates a projection whose output is activation(gate) * value. The weight has 2 d output
        features: first the gates, then the values.
        """

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Converts the weight of a norm to the form that `rms_norm` expects. The weight is in
        float32 or in the model's data type, and is not rounded.
        """

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """Whether one grouped product of all experts (see GroupedExperts) is faster than a
        projection for each expert, for this data type and inner width.
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [n, d] or [n, m, d] divided by the root of its mean square, times the weight [d]."""

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Adds the update [n, d] to the residual [n, d] in place, and normalizes the sum."""

    def fused_decoder(
        self, weights: DecoderWeights, constants: DecoderConstants
    ) -> FusedDecoder | None:
        """Returns the decoder as one operation, or None if these kernels do not support it.
        Projections and norms must have been created by these kernels.
        """

    def shared_ranks(self, rank: int, size: int, timeout_seconds: float) -> SharedRanks | None:
        """Returns collectives for ranks on one machine, or None if these kernels have none."""

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> PackedLora:
        """Packs an adapter for these kernels. The tensors in `layers` have the data type `dtype`
        and are on the model's device. `shapes` maps names of LoraLayer's fields to the shapes of
        the projections in each layer.
        """

    def lora_step(self, rows: LoraRows) -> LoraStep:
        """Prepares the LoRA adapters of a step. These kernels must have packed them."""

    def row_sampler(self) -> RowSampler | None:
        """Returns a compiled sampler for rows of logits on the host, or None if there is none."""

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        """Allocates a KV cache, and returns the attention over it."""

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        """Upper estimate of the bytes that attention needs in addition to the KV cache."""
