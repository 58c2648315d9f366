"""Tiny seeded models of every supported architecture, saved as Hugging Face directories.

The weights are drawn with a large variance, so that greedy outputs vary. A kind, such as "llama",
names an entry of TINY_MODELS. Its weights are the same on all machines whose random number
generators agree.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JetMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)

VOCAB_SIZE = 320
MAX_POSITION_EMBEDDINGS = 512
TILED = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
"""Changes to a kind's configuration. With these sizes, processors with tile registers compute
projections and attention scores with tiles.
"""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    """A kind of tiny model: its configuration class, and changes to the common configuration."""

    config_class: type[PretrainedConfig]
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> PretrainedConfig:
        return self.configured()

    def configured(self, **changes: Any) -> PretrainedConfig:
        return self.config_class(**{**_SHAPE, **self.changes, **changes})


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "pad_token_id": 0,
}
_WINDOW_PATTERN = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
}
_GEMMA4 = {
    **_WINDOW_PATTERN,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(LlamaConfig),
    "llama_tied": TinyModel(LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biases": TinyModel(
        LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
    ),
    "llama_wide_heads": TinyModel(LlamaConfig, {"head_dim": 32, "num_key_value_heads": 4}),
    "llama_llama3": TinyModel(
        LlamaConfig,
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_linear": TinyModel(LlamaConfig, _rope(rope_type="linear", factor=4.0)),
    "llama_dynamic": TinyModel(LlamaConfig, _rope(rope_type="dynamic", factor=2.0)),
    "llama_yarn": TinyModel(
        LlamaConfig, _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "mistral": TinyModel(MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral_window": TinyModel(MistralConfig, {"sliding_window": 20}),
    "mistral_wide_window": TinyModel(MistralConfig, {"sliding_window": 200}),
    "mixtral": TinyModel(MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": TinyModel(Qwen2Config, {"use_sliding_window": False}),
    # Two full-attention and three windowed layers form three KV-cache groups of up to two layers.
    "qwen2_window": TinyModel(
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
            "num_hidden_layers": 5,
        },
    ),
    "qwen3": TinyModel(Qwen3Config, {"head_dim": 16}),
    # The second layer has a dense MLP instead of experts.
    "qwen3_moe": TinyModel(
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_moe_normalized": TinyModel(
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": TinyModel(
        Gemma2Config,
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    # One layer with full attention and five with a window form six KV-cache groups of one layer.
    "gemma3": TinyModel(Gemma3TextConfig, {**_GEMMA, "num_hidden_layers": 6, "sliding_window": 16}),
    # This model has no native implementation, so transformers runs it.
    "afmoe": TinyModel(
        AfmoeConfig,
        {
            **_WINDOW_PATTERN,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "cohere2": TinyModel(
        Cohere2Config,
        {"num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 0.5, **_WINDOW_PATTERN},
    ),
    "gpt_neox": TinyModel(GPTNeoXConfig, {"initializer_range": 1.0}),
    "gemma3n": TinyModel(
        Gemma3nTextConfig,
        {
            **_WINDOW_PATTERN,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "head_dim": 16,
            "intermediate_size": [96, 64, 96, 96],
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    # Keys of layers without a window have another shape than keys of layers with a window. In the
    # first model, keys of both shapes have the same number of bytes. In the second model, keys
    # without a window have half the bytes, so that a block of their KV-cache group has more tokens.
    "gemma4": TinyModel(Gemma4TextConfig, _GEMMA4),
    "gemma4_moe": TinyModel(
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "num_key_value_heads": 4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "granite": TinyModel(GraniteConfig, {"logits_scaling": 2.0, "residual_multiplier": 0.8}),
    "jetmoe": TinyModel(
        JetMoeConfig, {"kv_channels": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "olmo2": TinyModel(Olmo2Config, {"pad_token_id": 0}),
    "opt": TinyModel(
        OPTConfig,
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 48,
            "init_std": 0.25,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    # Recurrent layers in addition to attention layers: gated delta nets, or Mamba-2. In falcon_h1
    # each layer has both attention and Mamba-2.
    "qwen3_next": TinyModel(
        Qwen3NextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "bamba": TinyModel(BambaConfig, {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2]}),
    "falcon_h1": TinyModel(FalconH1Config, {**_MAMBA, "mamba_d_ssm": 96}),
    "granite_hybrid": TinyModel(
        GraniteMoeHybridConfig,
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "starcoder2": TinyModel(Starcoder2Config, {"sliding_window": 20, "initializer_range": 0.6}),
}

CACHES = [
    "bamba",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "llama",
    "mistral_window",
    "qwen2_window",
    "qwen3_next",
]
"""Kinds that cover all KV caches of TINY_MODELS: block shapes, windows and recurrent states."""


def build_tiny_model(
    kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Creates the model of a kind in inference mode. `changes` are changes to its configuration."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(TINY_MODELS[kind].configured(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    return model.to(dtype).eval()


def save_tiny_model(
    directory: Path,
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard_bytes: int | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Saves and returns the model of a kind. `shard_bytes` limits the size of a weights file."""
    model = build_tiny_model(kind, dtype=dtype, seed=seed, **changes)
    shards = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(directory, **shards)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Overwrites keys of config.json. A value of None removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
