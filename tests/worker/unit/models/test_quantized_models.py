"""Workers with quantized models: their fingerprints, and models that they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.backends.choices import DeviceSetting
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.quantized import quantize_int8
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.build import build_worker
from services.worker.models.config import DtypeSetting, read_model_config
from services.worker.models.errors import ModelConfigError, ModelTensorError, UnsupportedModel
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadOptions
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.platform_choice import select_platform
from services.worker.settings import WorkerSettings
from tests.quantized_checkpoints import FORMATS, save_quantized
from tests.tiny_models import edit_config, save_tiny_model


def settings(model: Path, quantization: QuantizationSetting, **changes: object) -> WorkerSettings:
    return WorkerSettings(
        model=model, quantization=quantization, num_blocks=40, max_model_len=64, **changes
    )


def test_keys_and_values_are_not_shared_with_those_of_stored_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    fingerprints = {
        build_worker(settings(tmp_path, quantization), "one", lambda: None).description.fingerprint
        for quantization in QuantizationSetting
    }
    assert len(fingerprints) == len(QuantizationSetting)


def test_a_model_without_native_code_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "opt")
    with pytest.raises(UnsupportedModel, match="quantization int8: architecture OPTForCausalLM"):
        build_worker(settings(tmp_path, QuantizationSetting.INT8), "one", lambda: None)


GPTQ = FORMATS["gptq"].config
AWQ = FORMATS["awq"].config
PACKED = FORMATS["pack_int4"].config
FP8 = {"quant_method": "fp8"}


def weights(**changes: object) -> dict[str, object]:
    """A configuration of compressed-tensors. `changes` are changes to its settings of weights."""
    group = PACKED["config_groups"]["group_0"]
    changed = {**group, "weights": group["weights"] | changes}
    return {**PACKED, "config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config: bits is 3, but only 4 and 8 are supported"),
        ({**GPTQ, "sym": False}, "sym false: zero points of GPTQ are not supported"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic: different quantization of some projections"),
        ({**GPTQ, "group_size": 0}, "quantization_config.group_size must be a whole number"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', but only gemm is supported"),
        (
            {**AWQ, "zero_point": False},
            "zero_point false: AWQ without zero points is not supported",
        ),
        (
            {**PACKED, "format": "nvfp4-pack-quantized"},
            ("format 'nvfp4-pack-quantized' is not supported"),
        ),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        (
            {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: format is 'sparse-24-bitmask', but only dense is supported",
        ),
        ({**PACKED, "ignore": "lm_head"}, "quantization_config.ignore must be a list of names"),
        ({**PACKED, "ignore": ["re:("]}, "quantization_config.ignore has '(', which is not a"),
        ({**PACKED, "config_groups": {}}, "config_groups: has 0 groups, but only one is supported"),
        (weights(num_bits=2), "num_bits is 2, but only 4 and 8 are supported"),
        (weights(strategy="block"), "strategy 'block' is not supported with pack-quantized"),
        (weights(actorder="group"), "actorder 'group': reordered columns are not supported"),
        (weights(type="float"), "type is 'float', but only int is supported"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2', but only e4m3 is supported"),
        (
            {**FP8, "weight_block_size": [64, 128]},
            "weight_block_size is [64, 128], but only [128, 128] is supported",
        ),
        ({**FP8, "activation_scheme": "odd"}, "activation_scheme 'odd' is not supported"),
        ({"quant_method": "torchao"}, "weights quantized by 'torchao' are not supported"),
    ],
)
def test_unsupported_quantizations_are_refused_by_name(
    tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelConfigError) as refused:
        read_model_config(tmp_path)
    assert problem in refused.value.message


def load(directory: Path) -> None:
    options = LoadOptions(64, DtypeSetting.FLOAT32)
    load_model(open_checkpoint(directory), options, TorchKernels(), lambda *_: None)


def test_input_features_in_another_order_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS["gptq"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.up_proj.weight: desc_act: "):
        load(tmp_path / "model")


def test_biases_that_auto_gptq_adds_must_be_zero(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS["gptq"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        bias = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        tensors[name.replace("scales", "bias")] = bias
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    load(tmp_path / "model")
    tensors["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelTensorError, match=r"layers.1.mlp.up_proj.bias .* it is not zero"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("of", "part", "needed"),
    [
        ("int8", "weight", "int8"),
        ("awq", "qzeros", "int32"),
        ("pack_int4", "weight_packed", "int32"),
    ],
)
def test_codes_of_another_data_type_are_refused(
    tmp_path: Path, of: str, part: str, needed: str
) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS[of])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{part} is torch.float32, not torch.{needed}"):
        load(tmp_path / "model")


def test_parts_of_one_projection_are_quantized_alike(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    keys = "model.layers.0.self_attn.k_proj"
    config = {**PACKED, "ignore": ["lm_head", keys]}
    mixed = replace(FORMATS["pack_int4"], config=config, ignored=("lm_head", keys))
    save_quantized(tmp_path / "plain", tmp_path / "model", mixed)
    with pytest.raises(
        UnsupportedModel, match=(r"q_proj.*: some of these weights are quantized and some are not")
    ):
        load(tmp_path / "model")


def test_groups_that_do_not_divide_a_weight_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={**GPTQ, "group_size": 20})
    with pytest.raises(
        UnsupportedModel, match=r"shape \[48, 48\] cannot be divided into groups of 20"
    ):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS["awq"])
    group = 2 * AWQ["group_size"]
    edit_config(tmp_path / "model", quantization_config={**AWQ, "group_size": group})
    with pytest.raises(ModelTensorError, match=r"qzeros has shape \[6, 6\], but config.json"):
        load(tmp_path / "model")


def test_the_rest_of_a_quantized_model_may_be_quantized_at_load(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS["gptq"])
    heads = []
    for quantization in QuantizationSetting:
        options = LoadOptions(64, DtypeSetting.FLOAT32, quantization=quantization)
        loaded = load_model(
            open_checkpoint(tmp_path / "model"), options, TorchKernels(), lambda *_: None
        )
        heads.append(loaded.model.compute_logits(torch.eye(48)))
    stored = load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"]
    assert torch.allclose(heads[0], stored.T)
    assert torch.allclose(heads[1], quantize_int8(stored).dequantized().T)
    assert not torch.allclose(heads[1], stored.T)


def test_quantizing_at_load_is_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = settings(tmp_path, QuantizationSetting.INT8, device=DeviceSetting.CUDA)
    with pytest.raises(
        UnsuitableDevice, match="quantization of weights at load is supported only on the CPU"
    ):
        select_platform(asked, lambda: None, None)
