"""Sampling on the device, for rows of logits that need only a temperature and filters.

Stages, their order, and random numbers are the same as in the host's sampler (sampler.py). Only
top-p adds the probabilities in another order. Therefore the device and the host may differ in
whether they keep a token at the limit of top-p.
"""

import numpy as np
import torch

from services.worker.backends.device import Device
from services.worker.backends.row_sampler import UNUSABLE
from services.worker.sampling import race
from services.worker.sampling.sampler import SamplingMetadata

_TOKENS_AT_ONCE = 2**23


def sample_on_device(
    logits: torch.Tensor, metadata: SamplingMetadata, device: Device
) -> torch.Tensor:
    """Samples one token for each row of the logits, float32 [R, V]. Returns int64 [R], UNUSABLE for
    rows without a token to sample.
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
        _, top_k, top_p, min_p = metadata.parameters[:, drawing]
        if ((top_k > 0) | (top_p < 1) | (min_p > 0)).any():
            weights = torch.exp((chosen - largest_drawn) / temperature)
            chosen = _filtered(chosen, weights, *filters)
        drawn = _race(chosen, largest_drawn, temperature, states)
        token_ids = best.index_copy(0, rows, drawn)
    return torch.where(largest.isfinite(), token_ids, UNUSABLE).squeeze(1)


def _filtered(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Returns the logits [R, V], with minus infinity for tokens that the filters remove.

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


def _race(
    logits: torch.Tensor, largest: torch.Tensor, temperatures: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Draws a token for each row of the logits, float32 [R, V]. Returns int64 [R, 1], the tokens
    that Race draws (sampling/race.py). Unlike Race, it computes the time of every token, because
    the host would have to wait for the device to decide which blocks of tokens to skip.

    `largest`, float32 [R, 1]: each row's largest logit. `temperatures`, float32 [R, 1], above 0.
    `states`, int64 [R, 2]: each row's random states. A logit of minus infinity bans a token.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // race.SUPERBLOCK_SIZE) * race.NUM_LANES
    random = _words(states[:, :1], torch.arange(num_blocks, device=logits.device))
    smallest, indexes = _exponentials(random) / race.BLOCK_SIZE, random & (race.BLOCK_SIZE - 1)
    speeds, winners = [], []
    width = max(_TOKENS_AT_ONCE // num_rows, 1)
    for start in range(0, vocab_size, width):
        part = logits[:, start : start + width]
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        lane, offset = ids % race.NUM_LANES, ids % race.SUPERBLOCK_SIZE // race.NUM_LANES
        block = ids // race.SUPERBLOCK_SIZE * race.NUM_LANES + lane
        times = _exponentials(_words(states[:, 1:], ids))
        times.masked_fill_(indexes[:, block] == offset, 0)
        times += smallest[:, block]
        speed, winner = (((part - largest) / temperatures) - times.log_()).max(dim=1, keepdim=True)
        speeds.append(speed)
        winners.append(winner + start)
    return torch.cat(winners, dim=1).gather(1, torch.cat(speeds, dim=1).argmax(1, keepdim=True))


def _words(states: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """The random words that `race.words` computes in uint64. torch lacks uint64 arithmetic, so they
    are computed in int64, whose products wrap around, and whose right shifts need a mask.
    """
    mixed = states + indexes * _signed(race.GAMMA)
    for shift, factor in race.MIX:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return torch.bitwise_xor(mixed, _shifted(mixed, race.LAST_SHIFT))


def _exponentials(random: torch.Tensor) -> torch.Tensor:
    numbers = _shifted(random, race.NUMBER_SHIFT).double().add_(0.5).mul_(race.NUMBER_UNIT)
    return numbers.log_().neg_()


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    return torch.bitwise_and(words >> shift, 2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
