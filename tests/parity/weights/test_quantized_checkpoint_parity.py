"""From checkpoints of quantized weights, the worker computes the tokens that transformers computes
with the same weights in float32, with every kind of kernels and on two ranks.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from services.worker.backends.choices import KernelsSetting
from services.worker.models.errors import UnsupportedModel
from tests.lora_adapters import adapted_model
from tests.parity.exact import ExactModel
from tests.parity.quantized_serving import (
    Checkpoint,
    assert_is_what_transformers_computes,
    assert_logits_are_exact,
    assert_two_ranks_divide,
    serve,
)
from tests.quantized_checkpoints import FORMATS, GROUP, save_quantized
from tests.tiny_models import TILED, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory / "plain", "qwen2")
    floats = save_quantized(directory / "plain", directory / "quantized", FORMATS[request.param])
    return directory / "quantized", adapted_model(floats, None)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_it_is_what_transformers_computes(checkpoint: Checkpoint, kernels: KernelsSetting) -> None:
    assert_is_what_transformers_computes(checkpoint, kernels_setting=kernels)


def test_two_ranks_divide_it(checkpoint: Checkpoint) -> None:
    assert_two_ranks_divide(checkpoint)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_logits_in_bfloat16_do_not_depend_on_what_is_computed_with_them(
    tmp_path: Path, name: str
) -> None:
    """A quantization group has as many inputs as a tile."""
    save_tiny_model(tmp_path / "plain", "llama", **TILED)
    of = FORMATS[name]
    of = replace(of, group=32, config=of.config | {"group_size": 32})
    save_quantized(tmp_path / "plain", tmp_path / "quantized", of)
    model = ExactModel(tmp_path / "quantized", torch.bfloat16, KernelsSetting.NATIVE)
    assert_logits_are_exact(model)


def test_ranks_that_would_divide_a_group_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "plain", "llama", intermediate_size=3 * GROUP)
    save_quantized(tmp_path / "plain", tmp_path / "quantized", FORMATS["gptq"])

    def work(rank: RankThread) -> None:
        serve(tmp_path / "quantized", ranks=rank.ranks)

    with pytest.raises(
        UnsupportedModel, match=r"down_proj.weight: columns 0 to 12 are not whole groups"
    ):
        on_ranks(2, work)


def test_codes_fill_their_range(tmp_path: Path) -> None:
    """Weights with only a few different codes would not reveal a wrong order of bits."""
    save_tiny_model(tmp_path / "plain", "llama")
    save_quantized(tmp_path / "plain", tmp_path / "quantized", FORMATS["pack_int4"])
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    words = tensors["model.layers.0.self_attn.q_proj.weight_packed"].view(np.uint32)
    assert {int(word) >> 28 for word in words.flatten()} >= set(range(1, 16))
