"""The configuration of a native decoder, read from config.json."""

import enum
from dataclasses import dataclass
from pathlib import Path

from services.worker.models.architecture import (
    TRAITS,
    Architecture,
    Biases,
    Traits,
    native_architecture,
)
from services.worker.models.errors import ModelConfigError, UnsupportedModel
from services.worker.models.files.json_file import JsonReader, read_json_object
from services.worker.models.layer_config import LayerConfig, read_layers
from services.worker.models.quantization_config import QuantizationConfig, read_quantization
from services.worker.models.rope import RopeConfig, read_ropes


class DtypeSetting(enum.Enum):
    """The data type of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shapes of a decoder's tensors, and its hyperparameters."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The inner width of dense MLPs. The inner width of experts is in ExpertsConfig."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    """For each layer, the properties that may differ between layers."""
    rope: RopeConfig
    """Rotary positions of layers without an attention window."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the projection after attention has a bias."""
    mlp_bias: bool
    embedding_scale: float
    attention_scale: float
    """Factor by which products of queries and keys are multiplied."""
    attention_softcap: float | None
    """The cap c of attention scores: a score x becomes c tanh(x / c). None: no cap."""
    logits_softcap: float | None
    """The cap c of logits: a logit x becomes c tanh(x / c). None: no cap."""
    checkpoint_dtype: str | None
    """The data type of the checkpoint's weights, or None if it is unknown or unsuitable."""
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None = None
    """How the checkpoint's weights are quantized. None means unquantized."""

    @property
    def traits(self) -> Traits:
        return TRAITS[self.architecture]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_model_config(directory: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a native architecture. Raises ModelError."""
    path = directory / "config.json"
    reader = JsonReader(path, read_json_object(path))
    name = read_architecture(directory)
    architecture = native_architecture(name)
    if architecture is None:
        raise UnsupportedModel(path, f"architecture {name} has no native code")
    traits = TRAITS[architecture]
    _check_features(reader, traits)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", traits.head_dim or max(hidden_size // num_heads, 1))
    biased = reader.boolean("attention_bias", False) and traits.biases is Biases.CONFIGURED
    layers = read_layers(reader, traits, reader.count("num_hidden_layers"))
    attention_softcap, logits_softcap = _softcaps(reader, traits)
    dtype = str(reader.raw("dtype") or reader.raw("torch_dtype")).removeprefix("torch.")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.positive_float("rms_norm_eps", traits.rms_norm_eps),
        layers=layers,
        rope=read_ropes(reader, theta=traits.theta, local_theta=None)[0],
        tie_word_embeddings=reader.boolean("tie_word_embeddings", traits.tie_word_embeddings),
        qkv_bias=biased or traits.biases is Biases.QKV,
        output_bias=biased,
        mlp_bias=reader.boolean("mlp_bias", False) and traits.mlp_bias,
        embedding_scale=hidden_size**0.5 if traits.scaled_embedding else 1.0,
        attention_scale=_attention_scale(reader, traits, head_dim),
        attention_softcap=attention_softcap,
        logits_softcap=logits_softcap,
        checkpoint_dtype=dtype if dtype in _DTYPES else None,
        eos_token_ids=check_eos_token_ids(directory, reader, reader.integer("vocab_size")).integers(
            "eos_token_id"
        ),
        quantization=read_quantization(reader),
    )
    _check(config, reader)
    return config


def resolve_max_model_len(asked: int | None, default: int, longest: int, path: Path) -> int:
    """The maximum length of sequences in tokens: `asked`, or `default` if it is None. Raises
    ModelConfigError if `asked` exceeds `longest`, the model's own limit.
    """
    if asked is not None and asked > longest:
        raise ModelConfigError(
            path, f"max_model_len is {asked}, but the model supports at most {longest} tokens"
        )
    return default if asked is None else asked


def read_architecture(directory: Path) -> str:
    """The only entry of `architectures` in config.json. Raises ModelError."""
    path = directory / "config.json"
    names = read_json_object(path).get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelConfigError(path, f"architectures must name one architecture, not {names!r}")
    return names[0]


def _attention_scale(reader: JsonReader, traits: Traits, head_dim: int) -> float:
    if traits.query_pre_attn_scalar is None:
        return float(head_dim**-0.5)
    scalar = reader.positive_float("query_pre_attn_scalar", traits.query_pre_attn_scalar)
    return float(scalar**-0.5)


def _softcaps(reader: JsonReader, traits: Traits) -> tuple[float | None, float | None]:
    if traits.softcaps is None:
        return None, None
    attention, logits = traits.softcaps
    return (
        reader.nullable_float("attn_logit_softcapping", attention),
        reader.nullable_float("final_logit_softcapping", logits),
    )


def check_eos_token_ids(directory: Path, config: JsonReader, vocab_size: int) -> JsonReader:
    """Returns a reader of the file that defines the end tokens: generation_config.json if it has
    the key, otherwise config.json. Raises ModelConfigError for tokens outside the vocabulary.
    """
    path, reader = directory / "generation_config.json", config
    if path.exists():
        generation = JsonReader(path, read_json_object(path))
        reader = generation if "eos_token_id" in generation else config
    if any(token >= vocab_size for token in reader.integers("eos_token_id")):
        raise reader.error("eos_token_id", f"must be below vocab_size {vocab_size}")
    return reader


def _check_features(reader: JsonReader, traits: Traits) -> None:
    key = traits.activation_key
    activation = reader.text(key, traits.activation.value)
    same = {activation, "silu"} if activation == "swish" else {activation}
    if traits.activation.value not in same:
        problem = f"{key} {activation!r} is not supported; supported is {traits.activation.value}"
        raise UnsupportedModel(reader.path, problem)
    if reader.raw("use_bidirectional_attention"):
        problem = (
            "use_bidirectional_attention is not supported: a decoder attends only to earlier tokens"
        )
        raise UnsupportedModel(reader.path, problem)
    if traits.softcaps == (None, None) and "attn_logit_softcapping" in reader:
        problem = "attn_logit_softcapping is not supported for this architecture"
        raise UnsupportedModel(reader.path, problem)


def _check(config: ModelConfig, reader: JsonReader) -> None:
    if config.num_heads % config.num_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"is {config.num_kv_heads}, which does not divide num_attention_heads "
            f"{config.num_heads}",
        )
    if config.head_dim % 2:
        raise reader.error("head_dim", f"must be even, not {config.head_dim}")
