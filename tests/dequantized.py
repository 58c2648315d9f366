"""Writes the float32 model that equals a quantized model, for comparison with transformers."""

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.tiny_models import edit_config

Floats = npt.NDArray[np.float32]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def is_projection(name: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of a quantized projection."""
    is_weight = name.endswith("_proj.weight") or ".experts." in name or name == HEAD
    return is_weight and "gate.weight" not in name


def rounded_to_int8(weight: Floats) -> Floats:
    """Rounds each row of [..., out, in] to multiples of a 127th of its largest magnitude."""
    step = np.abs(weight).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(weight / np.where(step == 0, 1, step)) * step


def save_dequantized(directory: Path, to: Path) -> Path:
    """Copies a model directory, and rounds the weights of its projections to int8. An
    output head that is tied to the embedding becomes a separate tensor. Returns `to`.
    """
    shutil.copytree(directory, to)
    tensors = load_file(directory / "model.safetensors")
    if HEAD not in tensors:
        tensors[HEAD] = tensors[EMBEDDING].copy()
        edit_config(to, tie_word_embeddings=False)
    changed = {
        name: rounded_to_int8(tensor).astype(np.float32) if is_projection(name) else tensor
        for name, tensor in tensors.items()
    }
    save_file(changed, to / "model.safetensors", metadata={"format": "pt"})
    return to
