"""Converts Hugging Face's Llama weights to llama.cpp's names and order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.common.random_model import SIZES, tensor_dims
from benchmarks.worker.llama_weights import llama_name, llama_order, read_bfloat16, to_float32

CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1}


def test_the_bits_of_a_file_are_read_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "model.norm.weight": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "lm_head.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    read = dict(read_bfloat16(path))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor.view(torch.uint16).numpy())
        np.testing.assert_array_equal(to_float32(read[name]), tensor.float().numpy())


def test_other_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="F32, not BF16"):
        list(read_bfloat16(path))


def test_every_tensor_of_a_checkpoint_has_a_name() -> None:
    names = [llama_name(name) for name, _ in tensor_dims(SIZES["1.1b"])]
    assert len(set(names)) == len(names)
    assert names[:3] == ["token_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight"]
    assert names[-2:] == ["output_norm.weight", "output.weight"]


def test_halves_of_a_head_become_neighbours() -> None:
    """Each of two heads has four rows. Rotary embedding pairs rows 0 and 2, and rows 1 and 3."""
    rows = np.arange(8).reshape(8, 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert llama_order(name, rows, CONFIG).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    value = "model.layers.0.self_attn.v_proj.weight"
    assert llama_order(value, rows, CONFIG) is rows
