"""The decoder of the Llama family: pre-norm attention and gated MLP blocks.

Llama, Mistral, Qwen2 and Qwen3 are this one network with and without biases and query-key norm.
The projections of queries, keys and values are one matrix, as are those of gate and up.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.attention.interface import LayerAttention
from services.worker.models.config import ModelConfig
from services.worker.models.linear import Linear, padded_rows
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

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self._config = config
        self._weights = weights
        dtype = weights.embedding.dtype
        self._cos, self._sin = cos_sin_table(config.rope, config.head_dim, max_model_len, dtype)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Token ids and positions, int64 [n] -> normalized hidden states [n, hidden_size].

        Between the attentions there are rows of padding behind the n.
        """
        epsilon, num_tokens = self._config.rms_norm_eps, len(token_ids)
        padding = (0, padded_rows(num_tokens) - num_tokens)
        token_ids, positions = F.pad(token_ids, padding), F.pad(positions, padding)
        residual = F.embedding(token_ids, self._weights.embedding)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        for index, layer in enumerate(self._weights.layers):
            hidden = _rms_norm(residual, layer.input_norm, epsilon)
            residual.add_(self._attend(index, layer, hidden, cos, sin, attention, num_tokens))
            hidden = _rms_norm(residual, layer.post_attention_norm, epsilon)
            residual.add_(_gated_mlp(layer, hidden))
        return _rms_norm(residual, self._weights.norm, epsilon)[:num_tokens]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] -> logits, float32 [n, vocab_size]."""
        num_rows = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, padded_rows(num_rows) - num_rows))
        return self._weights.head(padded)[:num_rows].float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: LayerAttention,
        num_tokens: int,
    ) -> torch.Tensor:
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        rotated = heads[:, :num_rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = _rms_norm(heads[:, : config.num_heads], layer.query_norm, config.rms_norm_eps)
            key = _rms_norm(
                heads[:, config.num_heads : num_rotated], layer.key_norm, config.rms_norm_eps
            )
            rotated = torch.cat((query, key), dim=1)
        rotated = _rotate(rotated, cos, sin)[:num_tokens]
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        attended = attention(index, query, key, heads[:num_tokens, num_rotated:])
        return layer.output(F.pad(attended, (0, 0, 0, len(hidden) - num_tokens)))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [n, heads, head_dim] by cos and sin [n, 1, head_dim / 2], halves being the pairs."""
    first, second = heads.chunk(2, dim=-1)
    output = torch.empty(heads.shape, dtype=heads.dtype)
    lower, upper = output.chunk(2, dim=-1)
    torch.mul(first, cos, out=lower).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=upper).addcmul_(first, sin)
    return output


def _gated_mlp(layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(hidden).chunk(2, dim=-1)
    return layer.down(F.silu(gate).mul_(up))
