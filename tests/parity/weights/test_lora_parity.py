"""Requests for different adapters in one batch get the tokens that peft computes in float32."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from services.common.request.adapter import CONFIG_FILE, WEIGHTS_FILE
from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.native import lora
from tests.lora_adapters import CONFIGS, adapted_model, save_adapter
from tests.parity.exact import assert_same_answer
from tests.parity.oracle import assert_served
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner
from tests.worker.staged_runner import StagedRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 800
WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=3)


@dataclass(frozen=True)
class Adapted:
    """A model, LoRA adapters, and peft's model of each. The key None is without an adapter."""

    directory: Path
    adapters: list[Path]
    models: dict[Path | None, PreTrainedModel]

    def requests(self) -> list[Request]:
        """Two requests for each adapter and two without, with prompts of 1 to 41 tokens."""
        random = np.random.default_rng(7)
        kinds = [*self.adapters, None, *self.adapters, None]
        return [
            Request(
                random.integers(3, VOCAB_SIZE, 1 + 40 * (number % 3) // 2).tolist(),
                8,
                WITH_LOGPROBS,
                adapter=adapter,
            )
            for number, adapter in enumerate(kinds)
        ]

    def check(self, requests: list[Request]) -> None:
        for request in requests:
            assert_served(self.models[request.adapter], request, str(request.adapter))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A model with its adapters. The second model has biases and the sizes TILED."""
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, request.param, **(TILED if request.param == "qwen2" else {}))
    adapters = [
        save_adapter(directory, directory / "adapters" / name, seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    ]
    models = {adapter: adapted_model(directory, adapter) for adapter in [*adapters, None]}
    return Adapted(directory, adapters, models)


def driver(adapted: Adapted, **options: object) -> Driver:
    runner = build_runner(
        adapted.directory,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        adapters=adapted.adapters,
        **options,
    )
    return Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_mixed_batches_are_what_peft_computes(adapted: Adapted, kernels: KernelsSetting) -> None:
    requests, without = adapted.requests(), driver(adapted, kernels_setting=kernels)
    without.run(requests, chunk=7)
    adapted.check(requests)
    outputs = {tuple(request.output) for request in requests[:4]}
    assert len(outputs) == 4, "the adapters change nothing"


def test_a_dense_layer_between_layers_with_experts_is_adapted(tmp_path: Path) -> None:
    """peft would adapt the experts too. So the adapter is written here, and added to a weight."""
    save_tiny_model(tmp_path, "qwen3_moe")
    base, merged = adapted_model(tmp_path, None), adapted_model(tmp_path, None)
    weight = merged.get_parameter("model.layers.1.mlp.down_proj.weight").data
    adapter, random = tmp_path / "adapter", torch.Generator().manual_seed(0)
    a = 0.3 * torch.randn(4, weight.shape[1], generator=random)
    b = 0.3 * torch.randn(weight.shape[0], 4, generator=random)
    weight += 2 * b @ a
    adapter.mkdir()
    name = "base_model.model.model.layers.1.mlp.down_proj.lora"
    save_file({f"{name}_A.weight": a, f"{name}_B.weight": b}, adapter / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / CONFIG_FILE).write_text(json.dumps(config))
    adapted = Adapted(tmp_path, [adapter], {adapter: merged, None: base})
    requests = adapted.requests()
    driver(adapted).run(requests, chunk=7)
    adapted.check(requests)


def test_adapters_in_large_pages_add_the_same(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_LEAST_IN_LARGE_PAGES", 0)
    requests = adapted.requests()
    driver(adapted, kernels_setting=KernelsSetting.NATIVE).run(requests, chunk=7)
    adapted.check(requests)


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_is_each_request_alone(
    adapted: Adapted, kernels: KernelsSetting, dtype: torch.dtype
) -> None:
    together = adapted.requests()
    driver(adapted, kernels_setting=kernels, dtype=dtype).run(together, chunk=5)
    alone = driver(adapted, kernels_setting=kernels, dtype=dtype)
    for request in together:
        other = replace(
            request, output=[], tables=[], num_computed=0, prompt_rows=[], sampled_rows=[]
        )
        alone.run([other], chunk=64)
        assert_same_answer(request, other, str(request.adapter))


def test_two_ranks_share_each_layer(adapted: Adapted) -> None:
    """Adapters require no additional exchange between ranks."""

    def serve(rank: RankThread) -> list[Request]:
        torch.set_num_threads(1)
        requests = adapted.requests()
        driver(adapted, ranks=rank.ranks).run(requests, chunk=9)
        return requests

    for requests in on_ranks(2, serve):
        adapted.check(requests)


def test_two_pipeline_stages_serve_what_peft_computes(adapted: Adapted) -> None:
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "adapters": adapted.adapters}
    with StagedRunner(adapted.directory, 2, **options) as stages:
        requests = adapted.requests()
        Driver(stages, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS).run(requests, chunk=9)
        adapted.check(requests)
