"""The architectures that run natively, and the traits of each that config.json does not give.

All of them are one network, a pre-norm decoder with rotary positions, grouped queries and gated
MLPs; `Traits` names their differences. Traits are looked up by architecture only when config.json
is read; the layers are built from ModelConfig, which holds their consequences.
"""

import enum
from dataclasses import dataclass, replace

from services.worker.backends.choices import Activation


class Architecture(enum.Enum):
    """Architectures by the name that config.json gives them."""

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
    """The native decoder in a model that config.json calls `name`: with its own head, with one for
    classes (LlamaForSequenceClassification), or alone (LlamaModel); None if there is none.
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
    """Which layers have a window of `sliding_window` tokens."""

    NONE = "none"
    ALL = "every layer, where sliding_window is set"
    ALL_IF_ENABLED = "every layer, where use_sliding_window is true"
    UPPER_IF_ENABLED = "layer_types, else those from max_window_layers on where it is true"
    PATTERN = "layer_types, else all but each n-th"


class ExpertLayout(enum.Enum):
    """The names of experts in config.json and checkpoints."""

    MIXTRAL = "mixtral"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties that an architecture always has, and its defaults for keys of config.json."""

    biases: Biases = Biases.CONFIGURED
    mlp_bias: bool = False
    """Whether MLPs have biases where config.json has `mlp_bias`."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    windows: Windows = Windows.NONE
    default_window: int | None = 4096
    """The window where `sliding_window` is absent; None: no layer has one then."""
    window_pattern: int = 1
    """Layers of one period of the pattern, of which the last has no window."""
    experts: ExpertLayout | None = None
    """None: MLPs are dense."""
    activation_key: str = "hidden_act"
    """The key of config.json for the activation of MLPs, which must be `activation`."""
    activation: Activation = Activation.SILU
    output_norms: bool = False
    """Whether outputs of attention and MLP are normalized before they are added to the residual."""
    norm_weight_offset: float = 0.0
    """Added to the norm weights of checkpoints."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of `hidden_size`."""
    query_pre_attn_scalar: int | None = None
    """The default of that key, by whose root attention is scaled, not by that of `head_dim`; None:
    it is not read.
    """
    softcaps: tuple[float | None, float | None] | None = None
    """Defaults of `attn_logit_softcapping` and `final_logit_softcapping`; None: neither is read."""
    head_dim: int | None = None
    """None: `hidden_size` divided by the number of heads."""
    tie_word_embeddings: bool = False
    theta: float = 10_000.0
    """Base of the rotary embedding."""
    local_theta: float | None = None
    """That of layers with a window, if it is another one."""


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
    Architecture.MISTRAL: Traits(biases=Biases.NONE, windows=Windows.ALL),
    Architecture.MIXTRAL: Traits(
        biases=Biases.NONE,
        windows=Windows.ALL,
        default_window=None,
        experts=ExpertLayout.MIXTRAL,
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
"""One entry for each architecture."""
