"""Layer settings in config.json, with each name that models use for them."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from services.worker.models.config import ModelConfig, read_model_config
from services.worker.models.errors import ModelConfigError, UnsupportedModel
from tests.tiny_models import TINY_MODELS, edit_config


def read(directory: Path, kind: str, **changes: object) -> ModelConfig:
    """The configuration of a kind of model. `changes` overwrite keys, and None removes a key."""
    config = TINY_MODELS[kind].config
    config.save_pretrained(directory)
    architecture = type(config).__name__.replace("TextConfig", "Config")
    edit_config(directory, architectures=[architecture.replace("Config", "ForCausalLM")], **changes)
    return read_model_config(directory)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


ENABLED = {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"sliding_window": 64}, [None, None]),
        ("mistral", {"sliding_window": 64}, [64, 64]),
        ("mistral_window", {"sliding_window": None}, [4096, 4096]),
        (
            "mistral_window",
            {"layer_types": ["full_attention", "sliding_attention"]},
            [None, 20],
        ),
        ("mixtral", {}, [None, None]),
        ("mixtral", {"sliding_window": 64}, [64, 64]),
        ("qwen2", {"sliding_window": 64, "layer_types": None}, [None, None]),
        ("qwen2", {**ENABLED, "max_window_layers": 2}, [None, None]),
        ("qwen2", {**ENABLED, "max_window_layers": 1}, [None, 64]),
        ("qwen2", {**ENABLED, "max_window_layers": 0}, [64, 64]),
        ("qwen3_moe_normalized", {"use_sliding_window": True, "sliding_window": 9}, [9, 9]),
        ("qwen3_moe_normalized", {"sliding_window": 9}, [None, None]),
        ("gemma2", {"layer_types": None}, [20, None, 20, None]),
        ("gemma3", {"layer_types": None}, [16] * 5 + [None]),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}, [16, None] * 3),
    ],
)
def test_windows_of_layers_are_those_of_the_config(
    tmp_path: Path, kind: str, changes: dict[str, object], expected: list[int | None]
) -> None:
    assert windows(read(tmp_path, kind, **changes)) == expected


def test_a_null_sliding_window_means_full_attention(tmp_path: Path) -> None:
    assert windows(read(tmp_path, "mistral")) == [None, None]


def test_gemma_3_rotates_layers_with_a_window_by_another_base(tmp_path: Path) -> None:
    new = [layer.rope for layer in read(tmp_path, "gemma3").layers]
    assert [rope.theta for rope in new] == [1e4] * 5 + [1e6]
    assert [layer.rope for layer in read(tmp_path, "gemma3", rope_parameters=None).layers] == new
    stretched = read(
        tmp_path,
        "gemma3",
        rope_parameters=None,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert [(x.rope.theta, x.rope.factor) for x in stretched.layers[4:]] == [(2e4, 1), (5e5, 8)]
    scaled = {"rope_type": "linear", "factor": 8.0}
    both = read(
        tmp_path,
        "gemma3",
        rope_parameters={"full_attention": scaled, "sliding_attention": {"rope_type": "default"}},
        rope_theta=5e5,
        rope_local_base_freq=2e4,
    )
    assert both.layers == stretched.layers


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"],
)
def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path, kind: str) -> None:
    keys = ("rms_norm_eps", "tie_word_embeddings", "head_dim", "rope_parameters")
    found = read(tmp_path, kind, **dict.fromkeys(keys))
    expected = AutoConfig.from_pretrained(tmp_path)
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    width = expected.hidden_size // expected.num_attention_heads
    assert found.head_dim == (getattr(expected, "head_dim", None) or width)
    rope = expected.rope_parameters
    assert found.rope.theta == rope.get("full_attention", rope)["rope_theta"]


def test_which_layers_have_experts(tmp_path: Path) -> None:
    layers = read(tmp_path, "qwen3_moe").layers
    assert [layer.experts is None for layer in layers] == [False, True, False]
    sparse = read(tmp_path, "qwen3_moe", mlp_only_layers=None, decoder_sparse_step=2).layers
    assert [layer.experts is None for layer in sparse] == [True, False, True]


def test_each_architecture_has_its_own_normalization_of_experts(tmp_path: Path) -> None:
    for kind, normalized in (
        ("mixtral", True),
        ("qwen3_moe", False),
        ("qwen3_moe_normalized", True),
    ):
        experts = read(tmp_path, kind).layers[0].experts
        assert experts is not None
        assert experts.normalized is normalized


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types must list 5 layers"),
        ("qwen2_window", {"use_sliding_window": False}, "layer_types slide, but"),
        (
            "mistral_window",
            {"sliding_window": 1},
            "sliding_window must be a whole number of 2 or more",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be 5 or less"),
    ],
)
def test_layers_of_a_config_that_contradict_each_other_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ModelConfigError, match=problem):
        read(tmp_path, kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_unsupported_layer_features_are_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        read(tmp_path, kind, **changes)
