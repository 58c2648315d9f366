"""The decoder of the Llama family: pre-norm attention and gated MLP blocks.

Llama, Mistral, Qwen2 and Qwen3 are this one network with and without biases and query-key norm.
The projections of queries, keys and values are one matrix, as are those of gate and up.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.attention.interface import LayerAttention, Rotation
from services.worker.kernels.interface import Kernels, Linear
from services.worker.models.config import ModelConfig
from services.worker.models.rope import cos_sin_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block. `query_norm` and `key_norm` [head_dim] only with query-key norm."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. `embedding` [vocab_size, hidden_size]; `head` projects to the vocabulary."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


class Decoder:
    """A decoder that reads its past from a paged cache. Immutable; call under inference mode."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, max_model_len: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        dtype = weights.embedding.dtype
        self._cos, self._sin = cos_sin_table(config.rope, config.head_dim, max_model_len, dtype)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Token ids and positions, int64 [n] -> normalized hidden states [n, hidden_size].

        On the way there are rows of padding behind the n.
        """
        kernels, epsilon, num_tokens = self._kernels, self._config.rms_norm_eps, len(token_ids)
        padding = (0, kernels.padded_rows(num_tokens) - num_tokens)
        token_ids, positions = F.pad(token_ids, padding), F.pad(positions, padding)
        rotation = Rotation(self._cos[positions], self._sin[positions])
        residual = F.embedding(token_ids, self._weights.embedding)
        hidden = kernels.rms_norm(residual, self._norms[0], epsilon)
        for index, layer in enumerate(self._weights.layers):
            update = self._attend(index, layer, hidden, rotation, attention)
            hidden = kernels.add_rms_norm(residual, update, layer.post_attention_norm, epsilon)
            update = layer.down(kernels.silu_mul(layer.gate_up(hidden)))
            hidden = kernels.add_rms_norm(residual, update, self._norms[index + 1], epsilon)
        return hidden[:num_tokens]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] -> logits, float32 [n, vocab_size]."""
        num_rows = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, self._kernels.padded_rows(num_rows) - num_rows))
        return self._weights.head(padded)[:num_rows].float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rotation: Rotation,
        attention: LayerAttention,
    ) -> torch.Tensor:
        config = self._config
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        query, key, value = heads.tensor_split(
            (config.num_heads, config.num_heads + config.num_kv_heads), dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._kernels.rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = self._kernels.rms_norm(key, layer.key_norm, config.rms_norm_eps)
        return layer.output(attention(index, query, key, value, rotation))
