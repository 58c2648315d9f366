"""From checkpoints of 8-bit floats, the worker computes the tokens that transformers computes with
the same weights in float32.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.backends.choices import KernelsSetting
from services.worker.models.errors import UnsupportedModel
from tests.dequantized import is_projection
from tests.lora_adapters import adapted_model
from tests.parity.exact import ExactModel
from tests.parity.quantized_serving import (
    Checkpoint,
    assert_is_what_transformers_computes,
    assert_logits_are_exact,
    assert_two_ranks_divide,
    serve,
)
from tests.quantized_checkpoints import compressed
from tests.tiny_models import save_tiny_model

MOST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128
Tensors = dict[str, torch.Tensor]


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Quantizes a weight with one scale. Adds a scale of inputs, which must be ignored."""
    scale = weight.abs().max() / MOST
    return scale, {"weight_scale": scale, "input_scale": torch.ones(1)}


def by_channel(weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    scales = weight.abs().amax(1, keepdim=True) / MOST
    return scales, {"weight_scale": scales}


def by_block(weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Quantizes a weight with a scale for each block. The last block of rows may be incomplete."""
    rows, columns = weight.shape
    blocks = torch.zeros(-(-rows // BLOCK), columns // BLOCK)
    for row in range(blocks.shape[0]):
        for column in range(blocks.shape[1]):
            block = weight[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
            blocks[row, column] = block.abs().max() / MOST
    scales = blocks.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    return scales, {"weight_scale_inv": blocks}


CHANNELS = compressed("float-quantized", ("lm_head",), num_bits=8, strategy="channel")
CHANNELS["config_groups"]["group_0"]["weights"]["type"] = "float"
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "channel": (by_channel, CHANNELS),
    "block": (by_block, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
}


def save_floats(directory: Path, to: Path, scaled: Any, config: dict[str, Any]) -> Path:
    """Saves copies in 8 bits and in float32. Returns the directory of the float32 copy."""
    floats = to.with_suffix(".float")
    for copy in (to, floats):
        shutil.copytree(directory, copy)
    stored: Tensors = {}
    exact: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = exact[name] = tensor
        if is_projection(name) and name != "lm_head.weight":
            scales, tensors = scaled(tensor)
            stored[name] = (tensor / scales).to(torch.float8_e4m3fn)
            exact[name] = stored[name].float() * scales
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": value for part, value in tensors.items()}
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, floats / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((to / "config.json").read_text()) | {"quantization_config": config}
    (to / "config.json").write_text(json.dumps(values))
    return floats


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    save_tiny_model(directory / "plain", "qwen2", initializer_range=0.1, **shape)
    floats = save_floats(directory / "plain", directory / "fp8", *FORMATS[request.param])
    return directory / "fp8", adapted_model(floats, None)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_it_is_what_transformers_computes(checkpoint: Checkpoint, kernels: KernelsSetting) -> None:
    assert_is_what_transformers_computes(checkpoint, kernels_setting=kernels)


def test_two_ranks_divide_it(checkpoint: Checkpoint) -> None:
    assert_two_ranks_divide(checkpoint)


def test_logits_in_bfloat16_do_not_depend_on_what_is_computed_with_them(
    checkpoint: Checkpoint,
) -> None:
    directory, _ = checkpoint
    assert_logits_are_exact(ExactModel(directory, torch.bfloat16, KernelsSetting.NATIVE))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            torch.full((96, 48), torch.nan).to(torch.float8_e4m3fn),
            "up_proj.weight: it contains NaN",
        ),
        (torch.zeros(96, 48), "weight is torch.float32, not torch.float8_e4m3fn"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, value: torch.Tensor, problem: str) -> None:
    save_tiny_model(tmp_path / "plain", "llama")
    save_floats(tmp_path / "plain", tmp_path / "fp8", *FORMATS["channel"])
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = value
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=problem):
        serve(tmp_path / "fp8")
