"""From a checkpoint of weights and inputs in 8 bits (W8A8), the worker computes what transformers
computes in float32 if the inputs of projections are rounded.

The tests run with and without an adapter, with every kind of kernels, and on two ranks, each of
which rounds its own part of an input. Stepwell may add in another order than transformers. A number
halfway between two codes may then get the other code, which affects later numbers of the request.
Therefore most log-probabilities agree, but not all. Hardly any would agree if inputs were rounded
in another way or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from services.worker.backends.choices import KernelsSetting
from services.worker.models.quantization_config import QuantizationSetting
from tests.dequantized import HEAD, is_projection, save_dequantized
from tests.lora_adapters import CONFIGS, adapted_model, save_adapter
from tests.parity.exact import ExactModel
from tests.parity.oracle import LOGPROB_TOLERANCE, first_choices, logprobs
from tests.parity.quantized_serving import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WITH_LOGPROBS,
    assert_logits_are_exact,
)
from tests.quantized_checkpoints import W8A8, save_quantized
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

MOST, HARDLY_ANY = 0.6, 0.05
NEARLY_ALL = 0.9
DIVIDED = ("o_proj", "down_proj")
"""Projections whose inputs are divided among ranks."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., d], rounded to multiples of a 127th of their largest magnitude."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


def round_inputs(model: PreTrainedModel, num_ranks: int) -> PreTrainedModel:
    """Makes projections round their inputs. If an input is divided among ranks, each rank's part is
    rounded separately. Inputs of adapters are not rounded.
    """
    for name, module in model.named_modules():
        module_name = name.removesuffix(".base_layer")
        weight = f"{module_name}.weight"
        if not isinstance(module, nn.Linear) or weight.endswith(HEAD) or not is_projection(weight):
            continue
        parts = num_ranks if module_name.endswith(DIVIDED) else 1

        def hook(_: nn.Module, given: tuple[torch.Tensor], parts: int = parts) -> torch.Tensor:
            return rounded(given[0].unflatten(-1, (parts, -1))).flatten(-2)

        module.register_forward_pre_hook(hook)
    return model


@dataclass(frozen=True)
class Model:
    """The directories of the served model, of the same model in float32, and of an adapter."""

    served: Path
    quantization: QuantizationSetting
    floats: Path
    adapter: Path

    def oracles(self, num_ranks: int) -> dict[Path | None, PreTrainedModel]:
        """Transformers' models without and with the adapter."""
        return {
            adapter: round_inputs(adapted_model(self.floats, adapter), num_ranks)
            for adapter in (None, self.adapter)
        }

    def serve(self, **options: object) -> list[Request]:
        """Serves six requests, with prompt lengths from 1, together in chunks of 7."""
        random = np.random.default_rng(7)
        adapters = [None, self.adapter] * 3
        requests = [
            Request(tokens.tolist(), 8, WITH_LOGPROBS, adapter=adapter)
            for number, adapter in enumerate(adapters)
            for tokens in [random.integers(3, VOCAB_SIZE, 1 + 15 * number)]
        ]
        runner = build_runner(
            self.served,
            quantization=self.quantization,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            adapters=[self.adapter],
            **options,
        )
        Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS).run(requests, chunk=7)
        return requests


@pytest.fixture(scope="module", params=[QuantizationSetting.AUTO, QuantizationSetting.W8A8])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model from a quantized checkpoint, or a model quantized when it is loaded. In the latter
    the head is quantized, too, but not the head's inputs.
    """
    directory = tmp_path_factory.mktemp("model")
    plain, quantized = directory / "plain", directory / "quantized"
    save_tiny_model(plain, "qwen2")
    adapter = save_adapter(plain, directory / "adapter", 1, **CONFIGS["everywhere"])
    if request.param is QuantizationSetting.AUTO:
        return Model(quantized, request.param, save_quantized(plain, quantized, W8A8), adapter)
    return Model(plain, request.param, save_dequantized(plain, directory / "floats"), adapter)


def agreement(served: Sequence[Request], oracles: dict[Path | None, PreTrainedModel]) -> float:
    """The fraction of log-probabilities that agree with the oracle, transformers' model."""
    found = []
    for request in served:
        expected = logprobs(oracles[request.adapter], request).numpy()
        start = len(request.prompt) - 1
        for rows, exact in (
            (request.prompt_rows, expected[:start]),
            (request.sampled_rows, expected[start:-1]),
        ):
            if rows:
                ids = np.concatenate([part.token_ids for part in rows]).astype(np.int64)
                given = np.concatenate([part.logprobs for part in rows])
                distances = np.abs(given - np.take_along_axis(exact, ids, 1))
                found.append((distances < LOGPROB_TOLERANCE).flatten())
    return float(np.concatenate(found).mean())


def num_first_choices(
    served: Sequence[Request], oracles: dict[Path | None, PreTrainedModel]
) -> int:
    """The number of output tokens that are the first choice of the oracle, transformers' model."""
    return sum(
        chosen == token
        for request in served
        for chosen, token in zip(
            first_choices(oracles[request.adapter], request.prompt, request.output),
            request.output,
            strict=True,
        )
    )


@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
def test_it_is_what_transformers_computes_of_rounded_inputs(
    model: Model, kernels: KernelsSetting
) -> None:
    served, oracles = model.serve(kernels_setting=kernels), model.oracles(1)
    assert agreement(served, oracles) > MOST
    num_tokens = sum(len(request.output) for request in served)
    assert num_first_choices(served, oracles) > NEARLY_ALL * num_tokens
    unrounded = {adapter: adapted_model(model.floats, adapter) for adapter in oracles}
    assert agreement(served, unrounded) < HARDLY_ANY


def test_each_of_two_ranks_rounds_its_part(model: Model) -> None:
    def work(rank: RankThread) -> list[Request]:
        torch.set_num_threads(1)
        return model.serve(ranks=rank.ranks)

    for served in on_ranks(2, work):
        assert agreement(served, model.oracles(2)) > MOST
        assert agreement(served, model.oracles(1)) < HARDLY_ANY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", [KernelsSetting.NATIVE, KernelsSetting.TORCH])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_logits_do_not_depend_on_what_is_computed_with_them(
    tmp_path: Path, kind: str, dtype: torch.dtype, kernels: KernelsSetting
) -> None:
    save_tiny_model(tmp_path, kind, **TILED)
    exact = ExactModel(tmp_path, dtype, kernels, quantization=QuantizationSetting.W8A8)
    assert_logits_are_exact(exact)
