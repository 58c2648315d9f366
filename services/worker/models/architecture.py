"""The architectures that are implemented here, and the traits of each that config.json lacks.

All are pre-norm decoders with rotary positions, grouped queries and gated MLPs. `Traits` lists
their differences. Traits are used only while config.json is read: ModelConfig has the values
derived from them, and layers are built from ModelConfig.
"""

import enum
from dataclasses import dataclass, replace

from services.worker.backends.choices import Activation


class Architecture(enum.Enum):
    """The native architectures. Values are their names in config.json."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    MIXTRAL = "MixtralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"
    GEMMA2 = "Gemma2ForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"


_ENDINGS = ("ForCausalLM", "ForSequenceClassification", "Model")


def native_architecture(name: str) -> Architecture | None:
    """Returns the native decoder of a model class in config.json, or None if there is none.

    The class may have the decoder's own head, a head for classes (LlamaForSequenceClassification),
    or no head (LlamaModel).
    """
    known = {native.value: native for native in Architecture}
    for ending in _ENDINGS:
        if name.endswith(ending):
            body = name.removesuffix(ending).removesuffix("Text")
            return known.get(f"{body}ForCausalLM")
    return None


class Biases(enum.Enum):
    """Which attention projections have a bias."""

    CONFIGURED = "all four, where attention_bias is true"
    QKV = "queries, keys and values"
    NONE = "none"


class Windows(enum.Enum):
    """Which layers have an attention window of `sliding_window` tokens."""

    NONE = "none"
    ALL = "every layer, where sliding_window is set"
    LISTED = "layer_types, else every layer, where sliding_window is set"
    ALL_IF_ENABLED = "every layer, where use_sliding_window is true"
    UPPER_IF_ENABLED = "layer_types, else those from max_window_layers on where it is true"
    PATTERN = "layer_types, else all but each n-th"


class ExpertLayout(enum.Enum):
    """The names of experts in config.json and checkpoints."""

    MIXTRAL = "mixtral"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class Traits:
    """Fixed properties of an architecture, and its defaults for keys of config.json."""

    biases: Biases = Biases.CONFIGURED
    mlp_bias: bool = False
    """Whether the `mlp_bias` key of config.json is used."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    windows: Windows = Windows.NONE
    default_window: int | None = 4096
    """The attention window if config.json has no `sliding_window`. None means no window."""
    window_pattern: int = 1
    """The pattern of windows repeats after this many layers. The last of them has no window."""
    experts: ExpertLayout | None = None
    """How the tensors of experts are named. None means all MLPs are dense."""
    activation_key: str = "hidden_act"
    """The key of config.json for the activation of MLPs. The key's value must be `activation`."""
    activation: Activation = Activation.SILU
    output_norms: bool = False
    """Whether outputs of attention and MLP are normalized before they are added to the residual."""
    norm_weight_offset: float = 0.0
    """The number that is added to each norm weight of a checkpoint."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of `hidden_size`."""
    query_pre_attn_scalar: int | None = None
    """Default of the key `query_pre_attn_scalar`. Attention is scaled by 1 / sqrt(value). If None,
    the key is not read, and the value is `head_dim`.
    """
    softcaps: tuple[float | None, float | None] | None = None
    """Defaults of `attn_logit_softcapping` and `final_logit_softcapping`. None: neither is read."""
    head_dim: int | None = None
    """Default of the key `head_dim`. None means `hidden_size` divided by the number of heads."""
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    theta: float = 10_000.0
    local_theta: float | None = None
    """The base of the rotary embedding in layers with a window. None means `theta`."""


_GEMMA = Traits(
    windows=Windows.PATTERN,
    activation_key="hidden_activation",
    activation=Activation.GELU_TANH,
    output_norms=True,
    norm_weight_offset=1.0,
    scaled_embedding=True,
    query_pre_attn_scalar=256,
    head_dim=256,
    tie_word_embeddings=True,
)

TRAITS: dict[Architecture, Traits] = {
    Architecture.LLAMA: Traits(mlp_bias=True),
    Architecture.MISTRAL: Traits(biases=Biases.NONE, windows=Windows.LISTED),
    Architecture.MIXTRAL: Traits(
        *(Biases.NONE, False, False, Windows.ALL, None),
        experts=ExpertLayout.MIXTRAL,
        rms_norm_eps=1e-5,
        theta=1_000_000.0,
    ),
    Architecture.QWEN2: Traits(biases=Biases.QKV, windows=Windows.UPPER_IF_ENABLED),
    Architecture.QWEN3: Traits(qk_norm=True, windows=Windows.UPPER_IF_ENABLED, head_dim=128),
    Architecture.QWEN3_MOE: Traits(
        qk_norm=True, windows=Windows.ALL_IF_ENABLED, experts=ExpertLayout.QWEN3
    ),
    Architecture.GEMMA2: replace(_GEMMA, window_pattern=2, softcaps=(50.0, 30.0)),
    Architecture.GEMMA3: replace(
        _GEMMA,
        window_pattern=6,
        qk_norm=True,
        softcaps=(None, None),
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
}
