"""Copies of a model whose projections are quantized, in formats of compressed-tensors."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.worker.backends.quantized import quantize_int8
from services.worker.models.checkpoint import SINGLE_FILE

_GROUPS = (128, 64, 32, 16, 8)
_MOST = 7
_MIDDLE = 8
_IN_WORD = 8
_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

Tensors = dict[str, torch.Tensor]


def write_int4_model(model: Path, directory: Path) -> None:
    """Rounds the projections of a model in one file to 4 bits, symmetrically, in groups of 128
    input features, or of fewer where these do not divide a projection. Embedding and head stay.
    """
    with safe_open(model / SINGLE_FILE, framework="pt") as file:
        projections = filter(_is_projection, list(file.keys()))
        depths = [file.get_slice(name).get_shape()[1] for name in projections]
    group = next(size for size in _GROUPS if not any(depth % size for depth in depths))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    _write(
        model,
        directory,
        lambda weight: _pack_quantized(weight, group),
        stored="pack-quantized",
        scheme={"weights": weights},
    )


def write_w8a8_model(model: Path, directory: Path) -> None:
    """Rounds the projections of a model in one file to 8 bits, with a scale for each output
    feature; their inputs are to be rounded too. Embedding and head stay.
    """
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    _write(
        model,
        directory,
        _int_quantized,
        stored="int-quantized",
        scheme={"weights": weights, "input_activations": _DYNAMIC},
    )


def _write(
    model: Path,
    directory: Path,
    tensors_of: Callable[[torch.Tensor], Tensors],
    *,
    stored: str,
    scheme: Mapping[str, Any],
) -> None:
    """A copy in which a projection's weight is what `tensors_of` makes of it: tensors by what is
    added to the weight's name.
    """
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(SINGLE_FILE))
    tensors: Tensors = {}
    with safe_open(model / SINGLE_FILE, framework="pt") as file:
        for name in list(file.keys()):
            tensor = file.get_tensor(name)
            if _is_projection(name):
                tensors |= {f"{name}{end}": value for end, value in tensors_of(tensor).items()}
            else:
                tensors[name] = tensor
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def _is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def _int_quantized(weight: torch.Tensor) -> Tensors:
    quantized = quantize_int8(weight)
    return {"": quantized.codes, "_scale": quantized.scales}


def _pack_quantized(weight: torch.Tensor, group: int) -> Tensors:
    """Codes of eight columns in a word, the first in the lowest bits."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, -1, group)
    scales = grouped.abs().amax(-1) / _MOST
    codes = (grouped / scales.unsqueeze(-1)).round().long().view(rows, -1, _IN_WORD) + _MIDDLE
    shifts = torch.arange(0, 4 * _IN_WORD, 4)
    words = (codes << shifts).sum(-1)
    return {
        "_packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
        "_scale": scales.to(weight.dtype),
        "_shape": torch.tensor([rows, columns]),
    }
