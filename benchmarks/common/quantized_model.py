"""Writes a copy of a model with 4-bit projections, in the format of compressed-tensors."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.worker.models.files.tensor_files import SINGLE_FILE

_GROUPS = (128, 64, 32, 16, 8)
_MOST = 7
_MIDDLE = 8
_IN_WORD = 8


def write_int4_model(model: Path, directory: Path) -> None:
    """Rounds the projections of a model to 4 bits, symmetrically, in groups of 128 input features.
    If 128 does not divide the input features of every projection, groups are smaller. Embedding and
    output head stay unchanged. The model must have a single weights file.
    """
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(SINGLE_FILE))
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model / SINGLE_FILE, framework="pt") as file:
        names = list(file.keys())
        projections = [name for name in names if name.endswith("_proj.weight")]
        depths = [file.get_slice(name).get_shape()[1] for name in projections]
        group = next(size for size in _GROUPS if not any(depth % size for depth in depths))
        for name in names:
            tensor = file.get_tensor(name)
            if name in projections:
                packed = _pack_quantized(tensor, group)
                tensors |= {f"{name}_{part}": value for part, value in packed.items()}
            else:
                tensors[name] = tensor
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def _pack_quantized(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Packs the 4-bit codes of eight columns into one word, the first code in the lowest bits."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, -1, group)
    scales = grouped.abs().amax(-1) / _MOST
    codes = (grouped / scales.unsqueeze(-1)).round().long().view(rows, -1, _IN_WORD) + _MIDDLE
    shifts = torch.arange(0, 4 * _IN_WORD, 4)
    words = (codes << shifts).sum(-1)
    return {
        "packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
        "scale": scales.to(weight.dtype),
        "shape": torch.tensor([rows, columns]),
    }
