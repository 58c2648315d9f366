"""From a model directory to a decoder in memory."""

from collections.abc import Callable

import torch

from services.worker.kernels.interface import Kernels, Linear
from services.worker.models.checkpoint import Checkpoint, TensorReader
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import DecoderWeights, LayerWeights

Progress = Callable[[int, int], None]
"""Called with the number of layers read and the number there are."""

_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        _NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    layer = _layer_tensors(config)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Progress,
) -> DecoderWeights:
    """Reads, converts, fuses and packs all weights, layer by layer, as the kernels want them.

    Raises ModelError before anything is read when the tensors are not those of `config`.
    """
    checkpoint.check(expected_tensors(config), ignored=frozenset({_HEAD}))
    with checkpoint.open() as reader:
        layers = []
        for index in range(config.num_layers):
            layers.append(_load_layer(config, _LayerReader(reader, kernels, index, dtype)))
            progress(index + 1, config.num_layers)
        embedding = reader.read(_EMBEDDING, dtype=dtype)
        head = embedding if config.tie_word_embeddings else reader.read(_HEAD, dtype=dtype)
        norm = reader.read(_NORM, dtype=dtype)
    return DecoderWeights(embedding, tuple(layers), norm, kernels.linear(head, None))


class _LayerReader:
    """Reads tensors of one layer."""

    def __init__(
        self, reader: TensorReader, kernels: Kernels, index: int, dtype: torch.dtype
    ) -> None:
        self._reader = reader
        self._kernels = kernels
        self._prefix = f"model.layers.{index}."
        self._dtype = dtype

    def vector(self, name: str) -> torch.Tensor:
        return self._reader.read(f"{self._prefix}{name}.weight", dtype=self._dtype)

    def linear(self, *names: str, bias: bool) -> Linear:
        """Projections of the same input as one."""
        weights = (f"{self._prefix}{name}.weight" for name in names)
        biases = (f"{self._prefix}{name}.bias" for name in names)
        return self._kernels.linear(
            self._reader.read(*weights, dtype=self._dtype),
            self._reader.read(*biases, dtype=self._dtype) if bias else None,
        )


def _load_layer(config: ModelConfig, layer: _LayerReader) -> LayerWeights:
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return LayerWeights(
        input_norm=layer.vector("input_layernorm"),
        qkv=layer.linear(*attention, bias=config.qkv_bias),
        query_norm=layer.vector("self_attn.q_norm") if config.qk_norm else None,
        key_norm=layer.vector("self_attn.k_norm") if config.qk_norm else None,
        output=layer.linear("self_attn.o_proj", bias=config.output_bias),
        post_attention_norm=layer.vector("post_attention_layernorm"),
        gate_up=layer.linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
        down=layer.linear("mlp.down_proj", bias=config.mlp_bias),
    )


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
