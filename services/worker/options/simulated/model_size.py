"""Computes the size of a model, or of one rank's part of it, from the model's configuration."""

from dataclasses import dataclass

import torch

from services.worker.backends.attention import AttentionLayer
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import attention_layers
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.stage import StageLayers, divide_layers
from services.worker.profiles.profile import ModelSize

_BITS_AT_LOAD = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Computes the sizes of a model's parts. `config` describes the whole model."""

    config: ModelConfig
    dtype: torch.dtype
    quantization: QuantizationSetting = QuantizationSetting.AUTO

    def stage(self, stage: int, num_stages: int) -> StageLayers:
        """Returns the layers of a pipeline stage. All stages read about equally many bytes."""
        config = self.config
        each = [
            self._bytes(self._weights(config, attention, index, 1)[0])
            for index, attention in enumerate(attention_layers(config))
        ]
        own = divide_layers(each, self._head_bytes(1), num_stages)[stage]
        return StageLayers(own.start, own.stop, config.num_layers)

    def model_size(
        self, attention: tuple[AttentionLayer, ...], stage: StageLayers, num_ranks: int
    ) -> ModelSize:
        """Returns the size of a pipeline stage, or of one rank's part of it. `attention` has all
        layers of the model, with only this rank's heads. Inner widths of MLPs and the output
        projection are divided evenly among ranks.
        """
        config, own = self.config, attention[stage.start : stage.stop]
        stored = used = 0
        for index, layer in zip(stage.indexes, own, strict=True):
            of_layer = self._weights(config, layer, index, num_ranks)
            stored, used = stored + of_layer[0], used + of_layer[1]
        embedding, read_bytes = config.vocab_size * config.hidden_size, self._bytes(stored)
        if stage.is_last:
            read_bytes += self._head_bytes(num_ranks)
            used += embedding // num_ranks
        has_embedding = stage.is_first and not (stage.is_last and config.tie_word_embeddings)
        itemsize = self.dtype.itemsize
        keys = sum(layer.num_kv_heads * layer.head_dim for layer in own)
        return ModelSize(
            weight_bytes=read_bytes + (embedding * itemsize if has_embedding else 0),
            read_bytes=read_bytes,
            products_per_token=used,
            attention_width=sum(layer.num_heads * layer.head_dim for layer in own),
            kv_bytes_per_token=2 * keys * itemsize,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            itemsize=itemsize,
        )

    def _weights(
        self, config: ModelConfig, attention: AttentionLayer, index: int, num_ranks: int
    ) -> tuple[int, int]:
        """Returns the number of a layer's weights, and how many of them are used for one token."""
        heads = attention.num_heads + attention.num_kv_heads
        projections = 2 * config.hidden_size * heads * attention.head_dim
        experts = config.layers[index].experts
        inner = config.intermediate_size if experts is None else experts.intermediate_size
        width = 3 * config.hidden_size * inner // num_ranks
        if experts is None:
            return projections + width, projections + width
        return (
            projections + experts.num_experts * width,
            projections + experts.num_experts_per_tok * width,
        )

    def _bytes(self, num_weights: int) -> int:
        stored = self.config.quantization
        if stored is not None:
            return num_weights * stored.bits // 8
        if self.quantization is not QuantizationSetting.AUTO:
            return num_weights * _BITS_AT_LOAD // 8
        return num_weights * self.dtype.itemsize

    def _head_bytes(self, num_ranks: int) -> int:
        itemsize = self.dtype.itemsize
        if self.quantization is not QuantizationSetting.AUTO:
            itemsize = _BITS_AT_LOAD // 8
        return self.config.vocab_size * self.config.hidden_size // num_ranks * itemsize
