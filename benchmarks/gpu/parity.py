"""Compares the log-probabilities of given tokens between a model runner and transformers.

Each text is sent as a prompt, so that nothing depends on sampling. The first tokens of the text are
computed in one step, and each of the other tokens in a step of its own, as in decoding.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from services.common.request.sampling import SamplingParams
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput, StepOutput

GENERATION = 2**31


def largest_difference(
    runner: ModelRunner, reference: PreTrainedModel, texts: np.ndarray, num_single: int
) -> float:
    """The largest difference between both models' log-probabilities of the tokens of `texts`
    [batch, length]. The runner computes the last `num_single` tokens one by one. NaN counts as
    infinite.
    """
    ours = torch.from_numpy(log_probabilities(runner, texts, num_single))
    theirs = reference_log_probabilities(reference, texts)
    return float((ours - theirs).abs().nan_to_num(nan=torch.inf).max())


def log_probabilities(runner: ModelRunner, texts: np.ndarray, num_single: int) -> np.ndarray:
    """The log-probabilities of each text's tokens except the first, float32 [batch, length - 1]."""
    batch, length = texts.shape
    groups, width = len(runner.limits.windows), -(-length // runner.limits.block_size)
    blocks = 1 + np.arange(batch * groups * width, dtype=np.int32)
    tables = blocks.reshape(batch, groups, width)
    asking = SamplingParams(temperature=0, prompt_logprobs=0)
    entering = tuple(
        NewRequest(row, texts[row], length, asking, tuple(tables[row])) for row in range(batch)
    )
    rows, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    first = length - num_single
    steps = [StepInput(GENERATION, 0, rows, ones * first, ones * 0, new_requests=entering)]
    for computed in range(first, length - 1):
        steps.append(StepInput(GENERATION, len(steps), rows, ones, ones * computed))
    return np.concatenate([_of_prompts(runner.execute(step)) for step in steps], axis=1)


def _of_prompts(output: StepOutput) -> np.ndarray:
    """The log-probabilities of prompt tokens in a step's output. Each row is one request."""
    found = [of_request.prompt for of_request in output.logprobs.values()]
    return np.stack([rows.logprobs[:, 0] for rows in found if rows is not None])


def reference_log_probabilities(reference: PreTrainedModel, texts: np.ndarray) -> torch.Tensor:
    """transformers' log-probabilities of each text's tokens except the first."""
    token_ids = torch.from_numpy(texts).long().to(reference.device)
    with torch.inference_mode():
        logits = reference(input_ids=token_ids, use_cache=False).logits[:, :-1]
        chosen = token_ids[:, 1:, None]
        found: torch.Tensor = logits.float().log_softmax(-1).gather(-1, chosen)[..., 0].cpu()
    return found
