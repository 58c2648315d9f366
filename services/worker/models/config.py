"""What config.json says of a decoder of the Llama family."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.attention.interface import AttentionLayer
from services.worker.models.errors import ModelConfigError, UnsupportedModel
from services.worker.models.json_file import JsonReader, read_json_object
from services.worker.models.rope import RopeConfig, read_rope_config

_DEFAULT_WINDOW = 4096


class Architecture(enum.Enum):
    """The architectures that run natively, by the name that config.json gives them."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


class DtypeSetting(enum.Enum):
    """In what data type weights and cache are held."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder: what its tensors must be and how they are used.

    `qkv_bias`, `output_bias` and `mlp_bias` say which projections have one; `qk_norm`: queries and
    keys are normalized per head. `sliding_window` None: every layer sees every earlier token.
    `checkpoint_dtype` None: config.json does not say.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    checkpoint_dtype: torch.dtype | None
    eos_token_ids: tuple[int, ...]

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What attention does in each layer."""
        layer = AttentionLayer(
            self.num_heads, self.num_kv_heads, self.head_dim, scale=self.head_dim**-0.5
        )
        return (layer,) * self.num_layers

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """Reads config.json (and generation_config.json). Raises ModelError."""
    path = directory / "config.json"
    values = read_json_object(path)
    reader = JsonReader(path, values)
    architecture = _architecture(path, values)
    hidden_size = reader.positive_int("hidden_size")
    num_layers = reader.positive_int("num_hidden_layers")
    num_heads = reader.positive_int("num_attention_heads")
    attention_bias = reader.boolean("attention_bias", False)
    is_qwen2, is_mistral = architecture is Architecture.QWEN2, architecture is Architecture.MISTRAL
    config = ModelConfig(
        architecture=architecture,
        vocab_size=reader.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.positive_int("num_key_value_heads", num_heads),
        head_dim=reader.positive_int("head_dim", max(hidden_size // num_heads, 1)),
        rms_norm_eps=reader.positive_float("rms_norm_eps", 1e-6),
        rope=read_rope_config(reader, path),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=is_qwen2 or (attention_bias and not is_mistral),
        output_bias=attention_bias and not (is_qwen2 or is_mistral),
        mlp_bias=reader.boolean("mlp_bias", False) and architecture is Architecture.LLAMA,
        qk_norm=architecture is Architecture.QWEN3,
        sliding_window=_sliding_window(architecture, reader, values, num_layers),
        checkpoint_dtype=_checkpoint_dtype(reader),
        eos_token_ids=_eos_token_ids(directory, reader),
    )
    _check(config, reader)
    return config


def resolve_dtype(setting: DtypeSetting, config: ModelConfig) -> torch.dtype:
    """The data type to run in.

    Auto is bfloat16 for a bfloat16 checkpoint on a processor that computes in it, else float32,
    which holds every checkpoint exactly.
    """
    match setting:
        case DtypeSetting.FLOAT32:
            return torch.float32
        case DtypeSetting.BFLOAT16:
            return torch.bfloat16
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    stored_so = config.checkpoint_dtype is torch.bfloat16
    return torch.bfloat16 if stored_so and has_bfloat16 else torch.float32


def resolve_max_model_len(config: ModelConfig, asked: int | None, path: Path) -> int:
    """The longest sequence to serve: what was asked for, or what the model was made for.

    Raises ModelConfigError when the model cannot do it: beyond its positions, or beyond a
    sliding window, since every layer here sees every earlier token.
    """
    rope = config.rope
    if asked is not None and asked > rope.max_model_len:
        raise ModelConfigError(
            path, f"max_model_len is {asked}, but the model is made for {rope.max_model_len} tokens"
        )
    default = min(rope.max_model_len, rope.max_position_embeddings)
    length = asked if asked is not None else default
    if config.sliding_window is not None and length > config.sliding_window:
        raise UnsupportedModel(
            path,
            f"sliding_window is {config.sliding_window}, and sliding-window attention is not "
            f"supported; set max_model_len to {config.sliding_window} or less",
        )
    return length


def _architecture(path: Path, values: Mapping[str, object]) -> Architecture:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelConfigError(
            path, f"architectures must name one architecture, not {values.get('architectures')!r}"
        )
    try:
        return Architecture(names[0])
    except ValueError:
        known = ", ".join(kind.value for kind in Architecture)
        raise UnsupportedModel(
            path, f"architecture {names[0]} is not supported; supported are {known}"
        ) from None


def _sliding_window(
    architecture: Architecture, reader: JsonReader, values: Mapping[str, object], num_layers: int
) -> int | None:
    """The window that transformers would use; None when every layer attends to everything."""
    if not _some_layer_slides(architecture, reader, num_layers):
        return None
    if "sliding_window" in values and "sliding_window" not in reader:
        return None
    return reader.positive_int("sliding_window", _DEFAULT_WINDOW)


def _some_layer_slides(architecture: Architecture, reader: JsonReader, num_layers: int) -> bool:
    if architecture in (Architecture.LLAMA, Architecture.MISTRAL):
        return architecture is Architecture.MISTRAL
    layer_types = reader.raw("layer_types")
    if isinstance(layer_types, list):
        return "sliding_attention" in layer_types
    enabled = reader.boolean("use_sliding_window", False)
    return enabled and reader.positive_int("max_window_layers", 28) < num_layers


def _checkpoint_dtype(reader: JsonReader) -> torch.dtype | None:
    name = reader.raw("dtype") or reader.raw("torch_dtype")
    return _DTYPES.get(str(name).removeprefix("torch."))


def _eos_token_ids(directory: Path, reader: JsonReader) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    if path.exists():
        generation = JsonReader(path, read_json_object(path))
        if "eos_token_id" in generation:
            return generation.integers("eos_token_id")
    return reader.integers("eos_token_id")


def _check(config: ModelConfig, reader: JsonReader) -> None:
    activation = reader.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            reader.path, f"hidden_act {activation!r} is not supported; supported is silu"
        )
    if "quantization_config" in reader:
        raise UnsupportedModel(reader.path, "quantization_config: quantized weights are not read")
    if config.num_heads % config.num_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"must divide num_attention_heads {config.num_heads}, not {config.num_kv_heads}",
        )
    if config.head_dim % 2:
        raise reader.error("head_dim", f"must be even, not {config.head_dim}")
    if any(token >= config.vocab_size for token in config.eos_token_ids):
        raise reader.error("eos_token_id", f"must be below vocab_size {config.vocab_size}")
