"""Rotary frequencies equal transformers' frequencies, for both formats of the settings."""

import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.config import read_model_config
from services.worker.models.rope import RopeType
from services.worker.models.rope_tables import inverse_frequencies
from tests.tiny_models import TINY_MODELS, edit_config

STRETCHED = ["llama_llama3", "llama_linear", "llama_dynamic", "llama_yarn"]


def save_config(directory: Path, kind: str, **changes: object) -> None:
    TINY_MODELS[kind].config.save_pretrained(directory)
    edit_config(directory, architectures=["LlamaForCausalLM"], **changes)


@pytest.mark.parametrize("kind", STRETCHED)
def test_frequencies_equal_transformers(tmp_path: Path, kind: str) -> None:
    save_config(tmp_path, kind)
    config = read_model_config(tmp_path)
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim, 512)
    reference = ROPE_INIT_FUNCTIONS[config.rope.rope_type.value]
    expected, expected_factor = reference(TINY_MODELS[kind].config, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.3},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"mscale": 0.7, "mscale_all_dim": 0},
    ],
)
def test_yarn_takes_its_optional_parameters_as_transformers_does(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        **extra,
    }
    save_config(tmp_path, "llama", rope_parameters=parameters)
    config = read_model_config(tmp_path)
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim, 512)
    reference = TINY_MODELS["llama"].config
    reference.rope_parameters = parameters
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("kind", STRETCHED)
def test_old_and_new_spelling_mean_the_same(tmp_path: Path, kind: str) -> None:
    save_config(tmp_path, kind)
    new = read_model_config(tmp_path).rope
    parameters = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    old = {key: value for key, value in parameters.items() if key != "rope_theta"}
    old["type"] = old.pop("rope_type")
    edit_config(
        tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=parameters["rope_theta"]
    )
    assert read_model_config(tmp_path).rope == new


@pytest.mark.parametrize("outside", [{}, {"rope_theta": 5e5}])
def test_rope_scaling_that_is_added_to_rope_parameters_replaces_them(
    tmp_path: Path, outside: dict[str, object]
) -> None:
    """Model cards ask users to add it for long prompts. The model keeps its base."""
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    save_config(tmp_path, "llama", rope_parameters=parameters, rope_scaling=added, **outside)
    rope = read_model_config(tmp_path).rope
    alone = {**added, "rope_theta": 5e5}
    save_config(tmp_path, "llama", rope_parameters=alone)
    assert read_model_config(tmp_path).rope == rope
    assert rope.rope_type is RopeType.YARN


def test_the_dynamic_base_is_unscaled_up_to_the_trained_length_and_then_fixed(
    tmp_path: Path,
) -> None:
    save_config(tmp_path, "llama_dynamic")
    rope = read_model_config(tmp_path).rope
    assert rope.rope_type is RopeType.DYNAMIC
    plain, _ = inverse_frequencies(rope, 12, 512)
    stretched, _ = inverse_frequencies(rope, 12, 1024)
    reference = TINY_MODELS["llama_dynamic"].config
    device = torch.device("cpu")
    torch.testing.assert_close(plain, ROPE_INIT_FUNCTIONS["dynamic"](reference, device, 512)[0])
    torch.testing.assert_close(
        stretched, ROPE_INIT_FUNCTIONS["dynamic"](reference, device, 1024)[0]
    )


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("llama", 512), ("llama_linear", 2048), ("llama_dynamic", 1024), ("llama_yarn", 512)],
)
def test_stretching_sets_the_longest_sequence(tmp_path: Path, kind: str, longest: int) -> None:
    save_config(tmp_path, kind)
    assert read_model_config(tmp_path).rope.max_model_len == longest
