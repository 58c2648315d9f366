"""Decoders without a native implementation are run by transformers, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GptOssConfig,
    MambaConfig,
    MptConfig,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    T5Config,
)
from transformers.pytorch_utils import Conv1D

from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.config import DtypeSetting
from services.worker.models.errors import ModelError, ModelTensorError, UnsupportedModel
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.from_transformers.linear import DividedLinear, multiply_alike
from services.worker.models.from_transformers.probe import Refused
from services.worker.models.from_transformers.recurrent import RecurrentLayer, RecurrentProbe
from services.worker.models.load import load_model
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.models.suitability.check import check_model
from tests.tiny_models import VOCAB_SIZE, edit_config, save_tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

REFUSED: dict[str, tuple[type[PretrainedConfig], dict[str, Any], str]] = {
    "an encoder": (T5Config, {}, "architecture T5ForConditionalGeneration "),
    "nothing but states": (MambaConfig, {}, "MambaForCausalLM has no attention layer"),
    "no positions": (
        BloomConfig,
        {"n_layer": 2},
        "BloomForCausalLM biases its attention by distance (ALiBi)",
    ),
    "ALiBi of MPT": (
        MptConfig,
        {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
        "MptForCausalLM biases its attention by distance (ALiBi)",
    ),
    "attention of its own": (
        FalconConfig,
        {},
        "FalconForCausalLM does not use transformers' attention interface",
    ),
    "sinks": (GptOssConfig, {"head_dim": 8, "num_local_experts": 2}, "passes s_aux to attention"),
    "latent attention": (DeepseekV3Config, LATENT, "has values of another shape than its keys"),
    "long rope": (
        Phi3Config,
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        "rope_type 'longrope' is not supported",
    ),
    "long rope of some layers": (
        Olmo3Config,
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {**LONG, "rope_theta": 10000.0},
            },
            "original_max_position_embeddings": 32,
        },
        "rope_type 'longrope' is not supported",
    ),
}


def load(directory: Path, max_model_len: int | None = None) -> LoadedModel:
    options = LoadOptions(max_model_len, DtypeSetting.AUTO)
    return load_model(open_checkpoint(directory), options, TorchKernels(), lambda *_: None)


def save(directory: Path, config: PretrainedConfig) -> None:
    of = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    of.from_config(config).save_pretrained(directory)


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_need_unsupported_features_are_refused(tmp_path: Path, what: str) -> None:
    config_class, changes, problem = REFUSED[what]
    save(tmp_path, config_class(**{**SHAPE, **changes}))
    for refuse in (load, check_model):
        with pytest.raises(UnsupportedModel) as caught:
            refuse(tmp_path)
        assert caught.value.message.startswith(f"{tmp_path}/config.json: ")
        assert problem in caught.value.message
        assert "\n" not in caught.value.message


def test_a_loaded_model_has_its_architecture_sizes_and_eos_tokens(tmp_path: Path) -> None:
    save(tmp_path, OlmoConfig(**SHAPE))
    loaded = load(tmp_path, max_model_len=50)
    assert loaded.architecture == "OlmoForCausalLM"
    assert (loaded.dtype, loaded.max_model_len) == (torch.float32, 50)
    assert (loaded.vocab_size, loaded.hidden_size, loaded.intermediate_size) == (40, 16, 16)
    assert loaded.eos_token_ids == (2,)
    assert {(x.num_heads, x.num_kv_heads, x.head_dim) for x in loaded.attention} == {(2, 2, 8)}


def test_recurrent_layers_are_counted_apart_from_those_that_attend(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bamba")  # the third of four layers is an attention layer
    loaded = load(tmp_path)
    assert len(loaded.attention) == 1
    convolution, recurrence = (144 + 16, 4), (4, 24, 16)
    assert [state.tensors for state in loaded.states] == [
        ((convolution, torch.float32), (recurrence, torch.float32))
    ] * 3


class Forgetful(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        if cache_params is not None:
            cache_params.update_conv_state(hidden_states.mT, 0, conv_kernel_size=1)
            cache_params.update_recurrent_state(hidden_states[:, -1], 0)
        return hidden_states.cumsum(1)


def test_a_recurrent_layer_that_does_not_go_on_from_its_states_is_refused() -> None:
    layer = RecurrentLayer(Forgetful(), 0)
    with pytest.raises(
        Refused, match=("has recurrent layers that cannot continue from their stored states")
    ):
        RecurrentProbe(1e-3)(layer, torch.ones(1, 33, 4))


def test_models_of_more_than_text_are_refused_as_such(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gemma3")
    edit_config(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config={"model_type": "gemma3_text"},
        vision_config={"model_type": "siglip_vision_model"},
    )
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path)
    assert "Gemma3ForConditionalGeneration processes more than text (vision_config)" in str(
        caught.value
    )


def test_quantized_weights_are_refused_by_the_name_of_their_method(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "olmo2")
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match="weights quantized by 'gptq' are not supported"):
        load(tmp_path)


def test_windows_equal_the_arguments_of_attention(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "cohere2")
    assert [x.window for x in load(tmp_path).attention] == [20, None, 20, None]
    # A window that is longer than any sequence has no effect.
    assert [x.window for x in load(tmp_path, max_model_len=20).attention] == [None] * 4


def test_a_model_with_windows_only_in_its_masks_is_served_up_to_their_length(
    tmp_path: Path,
) -> None:
    """The 33 tokens of a probe are in the window of 40, so that it cannot find the difference."""
    save(tmp_path, PhimoeConfig(**SHAPE, sliding_window=40, num_local_experts=2))
    assert [x.window for x in load(tmp_path, max_model_len=40).attention] == [None, None]
    with pytest.raises(UnsupportedModel, match="so max_model_len may be at most 40"):
        load(tmp_path, max_model_len=41)


def test_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "opt")
    with pytest.raises(
        ModelError, match="max_model_len is 513, but the model supports at most 512"
    ):
        load(tmp_path, max_model_len=513)


def test_a_missing_tensor_is_refused_and_not_initialized(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_neox")
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelTensorError, match=r"tensor gpt_neox\.layers\.2\..* is missing"):
        load(tmp_path)


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, architectures=["NewForCausalLM"], model_type="new")
    with pytest.raises(UnsupportedModel, match="is unknown to Stepwell and to transformers"):
        load(tmp_path)


def test_a_model_that_needs_the_tokens_of_embedded_prompts_is_refused(tmp_path: Path) -> None:
    by_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
    save_tiny_model(tmp_path, "gemma4", **by_layer)
    with pytest.raises(UnsupportedModel, match="cannot compute prompts that are given as embed"):
        load(tmp_path)


def test_products_whose_rows_depend_on_their_number_are_computed_in_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear, addmm = F.linear, torch.addmm

    def uneven(x: torch.Tensor) -> float:
        return 1 + x[..., 0].numel() * 1e-3

    monkeypatch.setattr(
        F, "linear", lambda x, *parts, **named: linear(x, *parts, **named) * uneven(x)
    )
    monkeypatch.setattr(torch, "addmm", lambda bias, x, weight: addmm(bias, x, weight) * uneven(x))
    whole = nn.Linear(8, 12)
    layers = nn.ModuleList([whole, Conv1D(12, 8), DividedLinear(whole, rows=slice(0, 6))])
    random = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, generator=random)
    rows = torch.randn(1, 100, 8, generator=random)
    before = [layer(rows) for layer in layers]
    multiply_alike(layers)
    for layer, plain in zip(layers, before, strict=True):
        product = layer(rows)
        assert product.shape == plain.shape
        assert torch.equal(layer(rows[:, 90:97]), product[:, 90:97])
        assert torch.allclose(product / 1.032, plain / 1.1)
