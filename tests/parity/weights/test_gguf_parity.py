"""From GGUF files, the worker computes the tokens that transformers computes with the weights as
read by llama.cpp's own package.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from services.common.model_source.find import find_model
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.quantized import stacked
from services.worker.core.fingerprint import model_fingerprint
from services.worker.models.errors import ModelFileError, UnsupportedModel
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.files.gguf import BLOCK_TYPES, read_blocks
from tests.gateway.tiny_tokenizer import write_tokenizer
from tests.gguf_files import Types, random_blocks, save_alone, save_gguf
from tests.lora_adapters import adapted_model
from tests.parity.quantized_serving import (
    Checkpoint,
    assert_is_what_transformers_computes,
    assert_two_ranks_divide,
)
from tests.tiny_models import save_tiny_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
NARROW = {"hidden_size": 64, "intermediate_size": 128}
_ALL = (
    *("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Types]]] = {
    "q8_0": ("llama", NARROW, dict.fromkeys(_ALL, Types.Q8_0)),
    "q4_0": ("qwen2", NARROW, dict.fromkeys(_ALL[1:], Types.Q4_0)),
    # In files of type Q4_K_M, the parts of a fused projection have different types.
    "q4_k_m": ("llama", WIDE, dict.fromkeys(_ALL, Types.Q4_K) | {"v_proj": Types.Q6_K}),
    "q6_k": ("qwen3", {**WIDE, "head_dim": 32}, dict.fromkeys(_ALL, Types.Q6_K)),
}


@pytest.fixture(scope="module", params=FILES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    kind, shape, types = FILES[request.param]
    directory = tmp_path_factory.mktemp("model")
    model = save_tiny_model(directory / "plain", kind, **shape)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    floats = save_gguf(directory / "plain", directory / "gguf", types, kind, heads)
    return directory / "gguf", adapted_model(floats, None)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_it_is_what_transformers_computes(checkpoint: Checkpoint, kernels: KernelsSetting) -> None:
    assert_is_what_transformers_computes(checkpoint, kernels_setting=kernels)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_file_by_itself_is_the_model_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plain, file = tmp_path / "plain", tmp_path / "alone.gguf"
    model = save_tiny_model(plain, kind, **NARROW)
    write_tokenizer(plain)
    save_alone(plain, file, kind, pre="gpt-2")
    with monkeypatch.context() as own:  # later tests find compiled kernels in the usual cache
        own.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        directory = find_model(str(file))
    assert_is_what_transformers_computes((directory, model), kernels_setting=KernelsSetting.NATIVE)
    with (directory / "tokenizer.json").open() as found, (plain / "tokenizer.json").open() as of:
        assert json.load(found)["model"]["vocab"].items() >= json.load(of)["model"]["vocab"].items()


def test_numbers_of_heads_may_be_listed_by_layer(tmp_path: Path) -> None:
    """They determine the order of the rows of queries and keys."""
    save_tiny_model(tmp_path / "plain", "llama", **NARROW)
    floats = save_gguf(tmp_path / "plain", tmp_path / "gguf", {}, "llama", (4, 2), num_layers=2)
    name = "model.layers.1.self_attn.k_proj.weight"
    with open_checkpoint(tmp_path / "gguf").open() as found, open_checkpoint(floats).open() as of:
        assert torch.equal(found.read_part(name, ()), of.read_part(name, ()))


def test_two_ranks_divide_it(checkpoint: Checkpoint) -> None:
    assert_two_ranks_divide(checkpoint)


def test_a_changed_code_is_another_model(checkpoint: Checkpoint) -> None:
    file = checkpoint[0] / "model.gguf"
    before, content = fingerprint(checkpoint[0]), file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        assert fingerprint(checkpoint[0]) != before
    finally:
        file.write_bytes(content)


def fingerprint(directory: Path) -> bytes:
    return model_fingerprint(open_checkpoint(directory), 16, "float32")


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_what_llama_cpp_reads(name: str) -> None:
    of = Types[name]
    if name in ("Q4_0", "Q8_0"):
        weight = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
        blocks = gguf.quants.quantize(weight, of)
    else:
        blocks = random_blocks(of, 6, 512, 1)
    ours = read_blocks(name, blocks, torch.float32)
    theirs = gguf.quants.dequantize(blocks, of)
    assert np.abs(ours.dequantized().numpy() - theirs).max() <= 1e-6 * np.abs(theirs).max()
    assert ours.codes.abs().max() >= 2 ** (ours.bits - 1) - 1 - 96 * (name == "Q6_K")
    assert stacked([ours, ours]).bits == ours.bits


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:-5], "the file is incomplete: it ends within tensor"),
        (lambda content: content[:40], "the header is not that of a GGUF file"),
        (lambda content: b"GGML" + content[4:], "not that of a GGUF file of version 2 or 3"),
        (lambda content: content.replace(b"attn_q", b"attn_x"), r"attn_x.\w+ is not supported"),
        (
            lambda content: content.replace(b"qwen2", b"mamba", 1),
            "architecture 'mamba' is not supported; llama, qwen2, qwen3 are",
        ),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, change: Any, problem: str) -> None:
    save_tiny_model(tmp_path / "plain", "qwen2", **NARROW)
    save_gguf(tmp_path / "plain", tmp_path / "gguf", {"v_proj": Types.Q8_0}, "qwen2", (4, 2))
    file = tmp_path / "gguf" / "model.gguf"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises((ModelFileError, UnsupportedModel), match=problem):
        open_checkpoint(tmp_path / "gguf")


def test_other_types_of_blocks_are_refused_by_number(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "qwen2", **NARROW)
    save_gguf(tmp_path / "plain", tmp_path / "gguf", {"v_proj": Types.Q5_0}, "qwen2", (4, 2))
    with pytest.raises(UnsupportedModel, match=r"attn_v.weight is of type 6, not one of F32, F16"):
        open_checkpoint(tmp_path / "gguf")
