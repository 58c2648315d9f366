"""The operations that decoders are written against.

An implementation is chosen once, when a worker starts; weights are packed and caches laid out as it
wants them. Layers call it and know nothing of devices, instruction sets or page layouts.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.backends.attention import (
    AttentionShape,
    LayerAttention,
    PagedAttention,
    Rotation,
)


class Activation(enum.Enum):
    """What gates of an MLP go through, by the name that config.json gives it."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class Linear(Protocol):
    """Multiplication by a fixed weight [out, in], plus a fixed bias [out] if there is one."""

    @property
    def in_features(self) -> int:
        """Columns that go in."""
        ...

    @property
    def out_features(self) -> int:
        """Columns that come out."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]; n is a number that `Kernels.padded_rows` gives."""
        ...

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32, not rounded to x's data type where the implementation can."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """One layer of a decoder: attention and a gated MLP, each behind a norm.

    `query_norm` and `key_norm` [head_dim] only with query-key norm, the norms of outputs
    [hidden_size] only where outputs are normalized. `gate_up` is a gated projection. `rotation`:
    by which of a step's rotations it rotates.
    """

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_output_norm: torch.Tensor | None
    rotation: int


@dataclass(frozen=True, slots=True)
class DecoderFrame:
    """What is around the layers of a decoder.

    `embedding` [vocab_size, hidden_size], times `embedding_scale`; `rotations` of all positions;
    the `norm` behind the last layer, the `epsilon` of all norms; `head` projects to the vocabulary.
    """

    embedding: torch.Tensor
    embedding_scale: float
    rotations: tuple[Rotation, ...]
    norm: torch.Tensor
    epsilon: float
    head: Linear


class Stack(Protocol):
    """A decoder, from token ids to logits, as one operation."""

    def takes(self, attention: LayerAttention) -> bool:
        """Whether this is attention that it can run with."""
        ...

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids, int64 [n] -> normalized hidden states [n, hidden_size], and what `head` makes
        of those that are wanted, in float32: see Model.forward. `embedded` [n, hidden_size] stands
        in for what is looked up, unless it is None.
        """
        ...


class Kernels(Protocol):
    """Every operation takes and returns tensors of the model's data type on the model's device.

    A token's row of what is handed in is contiguous; results are contiguous, and new except where
    it is said.
    """

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows to compute in place of `num_rows`, not below it."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A projection, which owns its weight: packed, the caller's tensor is not kept."""
        ...

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """A projection of 2 d columns, gates before the values that they gate, which answers with
        activation(gate) * value.
        """
        ...

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a norm as the others want it, from one in float32 or in the model's data
        type; nothing is rounded.
        """
        ...

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """Whether experts of this data type and width inside are better multiplied by together,
        see GroupedExperts, than each as a projection.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [n, d] or [n, m, d] over the root of its mean square, times the weight [d]."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Adds the update [n, d] to the residual [n, d] in place, and normalizes the sum."""
        ...

    def stack(self, blocks: Sequence[DecoderBlock], frame: DecoderFrame) -> Stack | None:
        """The decoder as one operation, if these kernels have that. Projections and norms are
        theirs.
        """
        ...

    def paged_attention(self, shape: AttentionShape) -> PagedAttention:
        """Attention, and the KV cache that it owns, allocated here."""
        ...

    def attention_bytes(self, shape: AttentionShape, max_model_len: int) -> int:
        """Upper estimate of what attention holds besides the cache."""
        ...
