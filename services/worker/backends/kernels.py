"""The operations that decoders are written against.

An implementation is chosen once, when a worker starts. It packs weights and lays out caches as it
needs them. Layers call it and know nothing of devices, instruction sets or page layouts.
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
from services.worker.backends.choices import Activation
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

    @property
    def out_features(self) -> int:
        """Columns of the output."""

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        """[n, in] -> [n, out]; n is a number that `Kernels.padded_rows` gives. `delta`: what
        adapters add to the product, before its gates are applied.
        """

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32, without rounding to x's data type if the implementation can."""


class Mlp(Protocol):
    """An MLP over the tokens of a step."""

    def __call__(
        self, hidden: torch.Tensor, num_tokens: int, deltas: LayerDeltas = NO_DELTAS
    ) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size]. Rows from `num_tokens` on are padding, which is
        finite in the output if it is finite in the input. `deltas`: what adapters add.
        """


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """See Mlp: down(activation(gate(x)) * up(x)), where `gate_up` is a gated projection. Shazeer,
    GLU variants.
    """

    gate_up: Linear
    down: Linear

    def __call__(
        self,
        hidden: torch.Tensor,
        num_tokens: int,  # noqa: ARG002
        deltas: LayerDeltas = NO_DELTAS,
    ) -> torch.Tensor:
        return self.down(self.gate_up(hidden, deltas.gate_up), deltas.down)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer: attention and an MLP, each behind a norm.

    `query_norm` and `key_norm` [head_dim] are None without query-key norm, the norms of outputs
    [hidden_size] are None if outputs are not normalized. native/library.py makes the compiled
    library's structure from these fields, with those of GatedMlp for `mlp`.
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
    """The weights of a decoder, or of one pipeline stage of it."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]; without rows in a pipeline stage that is not the first."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None
    """After the last layer; None in a stage that is not the last, as is `head`."""
    head: Linear | None
    """Projects to the vocabulary."""
    ranks: Ranks = ALONE
    """The ranks that layers are divided over; their outputs of attention and MLPs are summed."""
    head_ranks: Ranks = ALONE
    """The ranks that the head is divided over, each with as many columns."""


@dataclass(frozen=True, slots=True)
class DecoderConstants:
    """The constants of a decoder."""

    embedding_scale: float
    """Factor of the embeddings."""
    rotations: tuple[Rotation, ...]
    """Cos and sin of all positions, of each rotary embedding that a layer has."""
    rotation_of: tuple[int, ...]
    """The index of each layer's rotation."""
    epsilon: float
    """The epsilon of all norms."""


class FusedDecoder(Protocol):
    """A decoder as one operation, from token ids to logits."""

    def accepts(self, attention: LayerAttention) -> bool:
        """Whether it can run with this attention."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None,
        wanted: torch.Tensor | None,
        lora: LoraStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids, int64 [n] -> hidden states [n, hidden_size], normalized if there is a norm,
        and the logits of the wanted rows, in float32, if there is a head: see Model.forward.
        `embedded` [n, hidden_size], unless None, replaces the embeddings of the ids. `lora`: the
        adapters of the rows.
        """


class Kernels(Protocol):
    """Every operation takes and returns tensors of the model's data type on the model's device.

    The rows of arguments are contiguous, one for each token. Results are contiguous and new, unless
    the operation says otherwise.
    """

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows to compute in place of `num_rows`; at least as many."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """A projection. It owns its weight; once packed, the caller's tensor is not kept. One that
        is quantized may be kept dequantized, rounded to the data type that is computed in; its
        inputs are not quantized then.
        """

    def gated_linear(
        self, weight: Weight, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """A projection whose output is activation(gate) * value. The weight has 2 d columns: first
        the gates, then the values.
        """

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a norm in the data type that the norms take, from one in float32 or in the
        model's data type, without rounding.
        """

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """Whether experts of this data type and inner width are computed faster all together, see
        GroupedExperts, than each as a projection.
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
        """The decoder as one operation, or None if these kernels have none for it. Its projections
        and norms were made by these kernels.
        """

    def shared_ranks(self, rank: int, size: int, timeout_seconds: float) -> SharedRanks | None:
        """Collectives of ranks on one machine, or None if these kernels have none."""

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> PackedLora:
        """An adapter in the form that these kernels need, of tensors of the model's data type on
        its device. `shapes`: of the projections of each layer, by their names in LoraLayer.
        """

    def lora_step(self, rows: LoraRows) -> LoraStep:
        """The adapters of a step, which these kernels have packed."""

    def row_sampler(self) -> RowSampler | None:
        """What draws tokens from rows of logits on the host, or None if these kernels have no
        compiled code for it.
        """

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        """Allocates a KV cache, and returns the attention over it."""

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        """Upper estimate of the memory that attention takes besides the cache."""
