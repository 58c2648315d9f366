"""With weights that are quantized at load, the worker computes the tokens that transformers
computes with the dequantized weights in float32: alone and with adapters, in chunks and together,
on two ranks and in two stages.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting
from services.worker.models.quantization_config import QuantizationSetting
from tests.dequantized import save_dequantized
from tests.lora_adapters import CONFIGS, adapted_model, save_adapter
from tests.parity.exact import ExactModel
from tests.parity.oracle import assert_served
from tests.parity.quantized_serving import assert_logits_are_exact
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner
from tests.worker.staged_runner import StagedRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 800
INT8 = QuantizationSetting.INT8
WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=3)


@dataclass(frozen=True)
class Quantized:
    """A model, and its dequantized model with each adapter. The key None is without an adapter."""

    directory: Path
    models: dict[Path | None, PreTrainedModel]

    def requests(self) -> list[Request]:
        random = np.random.default_rng(7)
        adapters = [*self.models] * 3
        return [
            Request(
                random.integers(3, VOCAB_SIZE, 1 + 15 * number).tolist(),
                8,
                WITH_LOGPROBS,
                adapter=adapter,
            )
            for number, adapter in enumerate(adapters)
        ]

    def check(self, requests: list[Request]) -> None:
        for request in requests:
            assert_served(self.models[request.adapter], request, str(request.adapter))

    def driver(self, **options: object) -> Driver:
        adapters = [adapter for adapter in self.models if adapter is not None]
        runner = build_runner(
            self.directory,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            adapters=adapters,
            quantization=INT8,
            **options,
        )
        return Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module", params=["qwen2", "gemma3", "mixtral"])
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Quantized:
    """A model with biases and an adapter, a model with a tied head, and a model with experts."""
    directory = tmp_path_factory.mktemp("model") / "stored"
    save_tiny_model(directory, request.param)
    dequantized = save_dequantized(directory, directory.with_name("dequantized"))
    models: dict[Path | None, PreTrainedModel] = {None: adapted_model(dequantized, None)}
    if request.param == "qwen2":
        adapter = directory.with_name("adapter")
        save_adapter(directory, adapter, 1, **CONFIGS["everywhere"])
        models[adapter] = adapted_model(dequantized, adapter)
    return Quantized(directory, models)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_it_is_what_transformers_computes(quantized: Quantized, kernels: KernelsSetting) -> None:
    requests = quantized.requests()
    quantized.driver(kernels_setting=kernels).run(requests, chunk=7)
    quantized.check(requests)


def test_it_is_another_model_than_the_stored_one(quantized: Quantized) -> None:
    request = quantized.requests()[-1]
    quantized.driver().run([request])
    with pytest.raises(AssertionError):
        assert_served(adapted_model(quantized.directory, request.adapter), request)


def test_two_ranks_have_the_same_codes(quantized: Quantized) -> None:
    def serve(rank: RankThread) -> list[Request]:
        torch.set_num_threads(1)
        requests = quantized.requests()
        quantized.driver(ranks=rank.ranks).run(requests, chunk=9)
        return requests

    for requests in on_ranks(2, serve):
        quantized.check(requests)


def test_two_pipeline_stages_serve_what_transformers_computes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "stored", "llama")
    model = adapted_model(save_dequantized(tmp_path / "stored", tmp_path / "dequantized"), None)
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "quantization": INT8}
    with StagedRunner(tmp_path / "stored", 2, **options) as stages:
        requests = Quantized(tmp_path, {None: model}).requests()
        Driver(stages, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS).run(requests, chunk=9)
    for request in requests:
        assert_served(model, request)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_do_not_depend_on_what_is_computed_with_them(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save_tiny_model(tmp_path, "llama", dtype=dtype, **TILED)
    model = ExactModel(tmp_path, dtype, KernelsSetting.NATIVE, quantization=INT8)
    assert_logits_are_exact(model)
