"""Filters: which tokens may be drawn.

All filters keep a prefix of one order: by falling logit, and among equal logits by rising id. So
ties do not depend on a sorting algorithm, and top-k of 1 is greedy. Each filter is then a number of
tokens. No filter sorts the vocabulary: top-k is a selection, and top-p sorts only the weights of
tokens that are probable enough to be kept.

Weights are probabilities up to a factor, float32, the largest 1. They are summed in float64.
"""

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.sampling.arrays import Float32Array, Float64Array, Int64Array

_BLOCK = 256


def best_token_ids(logits: Float32Array, count: int) -> Int64Array:
    """The `count` best tokens of a row of logits [V], by rising id. NaN counts as best of all."""
    surplus = len(logits) - count
    if surplus <= 0:
        return np.arange(len(logits))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(logits, surplus)[surplus]
    token_ids = np.flatnonzero(~(logits < threshold))
    if len(token_ids) > count:
        tied = np.flatnonzero(~(logits[token_ids] > threshold))
        token_ids = np.delete(token_ids, tied[count - len(token_ids) :])
    return token_ids


def keep_only(logits: Float32Array, token_ids: Int64Array) -> None:
    """Bans all other tokens of a row of logits [V], in place."""
    kept = logits[token_ids]
    logits.fill(-np.inf)
    logits[token_ids] = kept


def kept_token_ids(
    logits: Float32Array, weights: Float32Array, params: SamplingParams
) -> Int64Array | None:
    """The tokens that min-p, then top-k, then top-p keep, by rising id; None if all are kept.

    At least one token is kept. Top-p is a share of the mass that min-p and top-k keep; the token
    that reaches it is kept too.
    """
    limit = len(logits)
    if params.min_p > 0:
        limit = int(np.count_nonzero(weights >= np.float32(params.min_p)))
    if params.top_k > 0:
        limit = min(limit, params.top_k)
    if limit < len(logits):
        kept = best_token_ids(logits, limit)
        mass = weights[kept].sum(dtype=np.float64)
    elif params.top_p < 1:
        mass = weights.sum(dtype=np.float64)
        kept = _nucleus_candidates(weights, params.top_p, mass)
    else:
        return None
    if params.top_p < 1:
        falling = np.sort(weights[kept])[::-1]
        count = 1 + _index_at(falling, params.top_p * mass)
        kept = kept[best_token_ids(logits[kept], count)]
    return kept


def _nucleus_candidates(weights: Float32Array, top_p: float, mass: float) -> Int64Array:
    """A superset of the nucleus: the tokens left out have at most half the mass that may be cut."""
    return np.flatnonzero(weights > (1 - top_p) * mass / (2 * len(weights)))


def _index_at(weights: Float32Array, target: float) -> int:
    """The first index at which the sum of weights reaches the target.

    Found among the sums of blocks and then inside one block, since a running sum over all weights
    is slow: each addition waits for the one before.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    block = _position(blocks, target)
    before = blocks[block - 1] if block else 0.0
    start = block * _BLOCK
    inside = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    return start + _position(inside, target - before)


def _position(cumulative: Float64Array, target: float) -> int:
    """As `_index_at` over running sums; if rounding leaves no such index, the last that adds."""
    last = np.searchsorted(cumulative, cumulative[-1])
    return int(min(last, np.searchsorted(cumulative, target)))
