"""Compares a device's expert and sampling operations with reference results.

Grouped experts run in a recorded program (CUDA graph), and are compared with experts that are
computed one by one. Tokens and log-probabilities are compared with the results of the host's
sampler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import Activation
from services.worker.backends.cuda.kernels import CudaKernels
from services.worker.backends.device import Device
from services.worker.backends.kernels import GatedMlp
from services.worker.models.mlp import Experts, GroupedExperts
from services.worker.sampling.device_logprobs import logprobs_on_device
from services.worker.sampling.device_sampler import sample_on_device
from services.worker.sampling.sampler import Sampler

NUM_EXPERTS, NUM_PICKED, HIDDEN_SIZE, WIDTH = 32, 4, 512, 256
NUM_ROWS, VOCAB_SIZE = 48, 32000
NUM_TOP = 20
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95},
)


def experts_difference(device: Device, dtype: torch.dtype) -> float:
    """The largest relative difference between grouped experts and experts computed one by one.

    One recorded program runs several batches. NaN counts as infinite.
    """
    there = device.torch_device

    def random(*shape: int) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(shape, device=there) * shape[-1] ** -0.5
        return numbers.to(dtype)

    kernels = CudaKernels()
    gate_up, down = (
        random(NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE),
        random(NUM_EXPERTS, HIDDEN_SIZE, WIDTH),
    )
    router = kernels.linear(random(NUM_EXPERTS, HIDDEN_SIZE) * 8, None)
    picking: dict[str, Any] = {"num_picked": NUM_PICKED, "normalized": True}
    grouped = GroupedExperts(router, gate_up, down, activation=Activation.SILU, **picking)
    apart = tuple(
        GatedMlp(kernels.gated_linear(into, None, Activation.SILU), kernels.linear(out, None))
        for into, out in zip(gate_up, down, strict=True)
    )
    each = Experts(router, apart, kernels=kernels, **picking)
    worst = 0.0
    with torch.inference_mode():
        hidden = random(13, HIDDEN_SIZE)
        run = device.record(lambda: grouped(hidden, len(hidden)))
        for _ in range(4):
            hidden.copy_(random(*hidden.shape) * HIDDEN_SIZE**0.5)
            expected = each(hidden, len(hidden)).float()
            difference = (run().float() - expected).norm() / expected.norm()
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    return worst


def sampling_differences(device: Device) -> tuple[int, float]:
    """Compares rows of every kind of sampling with the host's sampler. Returns the number of tokens
    that differ, and the largest difference of a log-probability, which is infinite if top tokens or
    ranks differ.
    """
    samplers = _sampler(), _sampler()
    rows = np.arange(NUM_ROWS)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, device=device.torch_device).bfloat16().float() * 2
    expected = samplers[0].sample(logits, rows)
    token_ids = sample_on_device(logits, samplers[1].sampling_metadata(rows), device)
    others = int((token_ids.cpu().numpy() != expected.token_ids).sum())
    sampled = torch.from_numpy(expected.token_ids.astype(np.int64)).to(token_ids)
    found = logprobs_on_device(logits, sampled, samplers[1].num_logprobs(rows), device).wait()
    worst = 0.0
    for row, theirs in expected.logprobs.items():
        ours = found[row]
        if not np.array_equal(ours.token_ids, theirs.token_ids) or ours.ranks[0] != theirs.ranks[0]:
            return others, float("inf")
        worst = max(worst, float(np.abs(ours.logprobs - theirs.logprobs).max()))
    return others, worst


def _sampler() -> Sampler:
    sampler = Sampler(NUM_ROWS, VOCAB_SIZE)
    for row in range(NUM_ROWS):
        params = SamplingParams(seed=row, logprobs=NUM_TOP, **KINDS[row % len(KINDS)])
        sampler.add(row, params, np.arange(3), 3)
    return sampler
