"""In bfloat16 the error of every kind of model is within the documented limit, and about as small
as the error of transformers in bfloat16.

All runs use the same weights, which are rounded to bfloat16. The error at a position is the root
mean square difference of the log-probabilities of all tokens, in units of their standard deviation.
Rounding may change a router's choice of experts, after which results are completely different.
Therefore the median over all positions is compared, and only for models without experts the 90th
percentile, too.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting
from tests.parity.models_table import rows
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from tests.worker.runner_driver import Driver, Request, build_runner

MOST_TIMES_TRANSFORMERS = 1.25
NUM_PROMPTS, PROMPT_TOKENS = 4, 60
NUM_BLOCKS = 400
TOLERANCES = {kind: row.bfloat16 for row in rows() for kind in row.kinds}


def prompts() -> torch.Tensor:
    random = np.random.default_rng(2)
    return torch.from_numpy(random.integers(3, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS)))


@pytest.mark.parametrize("kind", sorted(TOLERANCES))
def test_bfloat16_is_as_close_to_float32_as_stated(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, kind, dtype=torch.bfloat16)
    exact = of_transformers(tmp_path, torch.float32)
    theirs = errors(of_transformers(tmp_path, torch.bfloat16), exact)
    quantiles = [0.5] if has_experts(kind) else [0.5, 0.9]
    for setting in (KernelsSetting.AUTO, KernelsSetting.TORCH):
        ours = errors(of_runner(tmp_path, setting), exact)
        assert ours.median() < TOLERANCES[kind], setting
        for quantile in quantiles:
            most = MOST_TIMES_TRANSFORMERS * theirs.quantile(quantile)
            assert ours.quantile(quantile) < most, (setting, quantile)


def has_experts(kind: str) -> bool:
    return not {"num_experts_per_tok", "top_k_experts"}.isdisjoint(TINY_MODELS[kind].changes)


@torch.inference_mode()
def of_transformers(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """The log-probabilities after every token of each prompt except its last."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval()(prompts()).logits[:, :-1].float().log_softmax(-1)


def of_runner(directory: Path, setting: KernelsSetting) -> torch.Tensor:
    """Like `of_transformers`, computed by a model runner: first the beginnings of all prompts in
    one step, then chunks, then single tokens.
    """
    runner = build_runner(
        directory, num_blocks=NUM_BLOCKS, dtype=torch.bfloat16, kernels_setting=setting
    )
    sampling = SamplingParams(temperature=0, prompt_logprobs=VOCAB_SIZE)
    requests = [Request(prompt, 1, sampling) for prompt in prompts().tolist()]
    driver = Driver(runner, block_size=16, num_blocks=NUM_BLOCKS)
    for count in (30, 19, *[1] * (PROMPT_TOKENS - 49)):
        driver.step([(request, count) for request in requests])
    found = torch.empty(NUM_PROMPTS, PROMPT_TOKENS - 1, VOCAB_SIZE)
    for request, distribution in zip(requests, found, strict=True):
        ids = np.concatenate([part.token_ids[:, 1:] for part in request.prompt_rows])
        values = np.concatenate([part.logprobs[:, 1:] for part in request.prompt_rows])
        distribution.scatter_(1, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(values))
    return found


def errors(distributions: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The error at each position, in units of the log-probabilities' standard deviation."""
    return ((distributions - exact).square().mean(-1).sqrt() / exact.std()).flatten()
