"""The decoder of all native architectures: attention and gated MLPs, each after a norm.

A Decoder may be one pipeline stage. `config` then has only the stage's layers. Each stage after the
first continues with the residual stream that the previous stage returned as hidden states.

Architectures differ in their weights (biases, query-key norms, output norms, experts) and in their
configuration (windows, scales, caps): see ModelConfig. The projections of queries, keys and values
are one matrix, and the gate and up projections are another.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionLayer, LayerAttention, Rotation
from services.worker.backends.kernels import DecoderConstants, DecoderWeights, Kernels, LayerWeights
from services.worker.backends.lora import NO_DELTAS, LayerDeltas, LoraStep
from services.worker.models.config import ModelConfig
from services.worker.models.model import ModelInput, wanted_logits
from services.worker.models.rope_tables import cos_sin_table


def attention_layers(config: ModelConfig) -> tuple[AttentionLayer, ...]:
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    scale, softcap = config.attention_scale, config.attention_softcap
    return tuple(AttentionLayer(*heads, scale, layer.window, softcap) for layer in config.layers)


class Decoder:
    """A decoder over a paged KV cache. Immutable. Must be called in torch's inference mode."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, max_model_len: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        """The norm before each layer, then the final norm (None before the last pipeline stage)."""
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._rope_of = tuple(ropes.index(layer.rope) for layer in config.layers)
        self._rotations = tuple(
            Rotation(*cos_sin_table(rope, config.head_dim, max_model_len, dtype, device))
            for rope in ropes
        )
        constants = self._embedding_scale, self._rotations, self._rope_of, config.rms_norm_eps
        self._fused = kernels.fused_decoder(weights, DecoderConstants(*constants))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(token_ids, self._weights.embedding)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the layers. Rows that pad the batch are computed too. Only the last stage normalizes
        the hidden states that it returns.
        """
        adapters = None if given.lora is None else self._kernels.lora_step(given.lora)
        if self._fused is not None and self._fused.accepts(given.attention):
            hidden, logits = self._fused(
                given.token_ids, given.attention, given.embedded, given.wanted, adapters
            )
            return hidden, None if logits is None else self._capped(logits)
        hidden = self._through_layers(given, adapters)
        if self._weights.head is None:
            return hidden, None
        return hidden, wanted_logits(self, hidden, given.wanted)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows, head = len(hidden), self._weights.head
        if head is None:
            raise AssertionError("a stage that is not the last has no head")
        padded = F.pad(hidden, (0, 0, 0, self._kernels.padded_rows(num_rows) - num_rows))
        return self._capped(self._weights.head_ranks.gather(head.full(padded))[:num_rows])

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self._config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _through_layers(self, given: ModelInput, adapters: LoraStep | None) -> torch.Tensor:
        kernels, epsilon = self._kernels, self._config.rms_norm_eps
        num_tokens, attention = len(given.token_ids), given.attention
        ranks = self._weights.ranks
        padding = (0, kernels.padded_rows(num_tokens) - num_tokens)
        positions = F.pad(given.positions, padding)
        rotations = [
            Rotation(whole.cos[positions], whole.sin[positions]) for whole in self._rotations
        ]
        if given.embedded is None:
            residual = self.embed(F.pad(given.token_ids, padding))
        else:
            residual = F.pad(given.embedded, (0, 0, *padding))
        hidden = kernels.rms_norm(residual, self._weights.layers[0].input_norm, epsilon)
        for index, layer in enumerate(self._weights.layers):
            rotation = rotations[self._rope_of[index]]
            deltas = NO_DELTAS if adapters is None else adapters.layer(index)
            update = ranks.sum(self._attend(index, layer, hidden, rotation, attention, deltas))
            update = self._normalized(update, layer.attention_output_norm)
            hidden = kernels.add_rms_norm(residual, update, layer.mlp_norm, epsilon)
            update = ranks.sum(layer.mlp(hidden, num_tokens, deltas))
            update = self._normalized(update, layer.mlp_output_norm)
            norm = self._norms[index + 1]
            if norm is None:
                return residual.add_(update)[:num_tokens]
            hidden = kernels.add_rms_norm(residual, update, norm, epsilon)
        return hidden[:num_tokens]

    def _normalized(self, update: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return update
        return self._kernels.rms_norm(update, norm, self._config.rms_norm_eps)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rotation: Rotation,
        attention: LayerAttention,
        deltas: LayerDeltas,
    ) -> torch.Tensor:
        config = self._config
        heads = layer.qkv(hidden, deltas.qkv).view(len(hidden), -1, config.head_dim)
        query, key, value = heads.tensor_split(
            (config.num_heads, config.num_heads + config.num_kv_heads), dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._kernels.rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = self._kernels.rms_norm(key, layer.key_norm, config.rms_norm_eps)
        attended = attention(index, query, key, value, rotation)
        return layer.output(attended, deltas.output)
