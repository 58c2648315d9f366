"""A worker's fingerprint depends on exactly the properties that determine keys and values."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.worker.backends.choices import KVCacheDtype, SumOrder
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.quantization_config import QuantizationSetting
from tests.tiny_models import edit_config, save_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", "llama")
    return tmp_path / "model"


def fingerprint(directory: Path, block_size: int = 16, dtype: str = "float32") -> bytes:
    return model_fingerprint(open_checkpoint(directory), block_size, dtype)


def test_a_copy_is_the_same_model(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    edit_config(tmp_path / "copy", transformers_version="0.0.0", _name_or_path="elsewhere")
    assert fingerprint(tmp_path / "copy") == fingerprint(directory)
    assert len(fingerprint(directory)) == 32


def test_one_changed_weight_changes_the_fingerprint(directory: Path) -> None:
    before = fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 5] += 1
    save_file(tensors, directory / "model.safetensors")
    assert fingerprint(directory) != before


def test_config_tokenizer_block_size_and_data_type_change_the_fingerprint(directory: Path) -> None:
    found = {fingerprint(directory), fingerprint(directory, 32), fingerprint(directory, 16, "x")}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    found.add(fingerprint(directory))
    edit_config(directory, rms_norm_eps=1e-4)
    found.add(fingerprint(directory))
    assert len(found) == 5


def test_quantization_at_load_changes_the_fingerprint(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    found = {
        model_fingerprint(checkpoint, 16, "float32", quantization=quantization)
        for quantization in QuantizationSetting
    }
    assert len(found) == len(QuantizationSetting)
    assert fingerprint(directory) in found


def test_the_caches_data_type_changes_the_fingerprint(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    found = {
        model_fingerprint(checkpoint, 16, dtype, kv_cache_dtype=kv_cache_dtype)
        for dtype in ("float32", "bfloat16")
        for kv_cache_dtype in KVCacheDtype
    }
    assert len(found) == 2 * len(KVCacheDtype)
    assert fingerprint(directory) in found


def test_the_order_of_sums_changes_the_fingerprint_in_bfloat16(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    for dtype, num_orders in (("float32", 1), ("bfloat16", len(SumOrder))):
        found = {
            model_fingerprint(checkpoint, 16, dtype, bfloat16_order=order) for order in SumOrder
        }
        assert len(found) == num_orders
        assert fingerprint(directory, 16, dtype) in found


def test_the_groups_of_layers_change_the_fingerprint(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    groupings = [
        (LayerGroup(None, (0, 1)),),
        (LayerGroup(16, (0,)), LayerGroup(None, (1,))),
        (LayerGroup(16, (1,)), LayerGroup(None, (0,))),
    ]
    found = {model_fingerprint(checkpoint, 16, "float32", groups=groups) for groups in groupings}
    assert len(found) == 3
