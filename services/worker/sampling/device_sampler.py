"""Sampling on the device, for rows that need only a temperature and filters.

Stages, their order, and random numbers are the same as in the host's sampler. torch computes them
for whole batches. Top-p sums weights in another order than the host's sampler. So, for a token at
the limit, the two samplers may differ in whether they keep it.
"""

import numpy as np
import torch

from services.worker.backends.device import Device
from services.worker.backends.row_sampler import UNUSABLE
from services.worker.sampling.device_race import race_on_device
from services.worker.sampling.sampler import SamplingMetadata


def sample_on_device(
    logits: torch.Tensor, metadata: SamplingMetadata, device: Device
) -> torch.Tensor:
    """Samples one token for each row of the logits, float32 [R, V]. Returns int64 [R], with
    UNUSABLE for rows without a token to sample.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    largest = logits.gather(1, best)
    token_ids = best
    drawing = np.flatnonzero(metadata.temperatures > 0)
    if len(drawing):
        rows = device.upload(drawing)
        words = metadata.states[drawing].T.view(np.float64)
        uploaded = device.upload(np.vstack((metadata.parameters[:, drawing], words)))
        temperature, *filters = uploaded[:-2].unsqueeze(-1)
        states = uploaded[-2:].view(torch.int64).T
        temperature, largest_drawn = temperature.float(), largest[rows]
        chosen = logits if len(drawing) == len(logits) else logits[rows]
        if _is_filtered(metadata, drawing):
            weights = torch.exp((chosen - largest_drawn) / temperature)
            chosen = _filtered(chosen, weights, *filters)
        drawn = race_on_device(chosen, largest_drawn, temperature, states)
        token_ids = best.index_copy(0, rows, drawn)
    return torch.where(largest.isfinite(), token_ids, UNUSABLE).squeeze(1)


def _is_filtered(metadata: SamplingMetadata, rows: np.ndarray) -> bool:
    _, top_k, top_p, min_p = metadata.parameters[:, rows]
    return bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())


def _filtered(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The logits [R, V], with minus infinity for tokens that the filters remove.

    Each filter keeps a prefix of the tokens, sorted by descending logit and then by ascending id.
    """
    vocab_size = logits.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    falling = weights.gather(1, order)
    limit = torch.where(top_k > 0, top_k, vocab_size)
    limit = torch.minimum(limit, (weights >= min_p).sum(dim=-1, keepdim=True))
    falling = falling * (torch.arange(vocab_size, device=logits.device) < limit)
    sums = falling.cumsum(dim=-1, dtype=torch.float64)
    before = sums - falling
    falling = falling * ((top_p >= 1) | (before < top_p * sums[:, -1:]))
    kept = torch.zeros_like(weights).scatter_(1, order, falling) > 0
    return logits.masked_fill(~kept, -torch.inf)
