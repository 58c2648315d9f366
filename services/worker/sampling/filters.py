"""Filters: min-p, top-k and top-p limit the tokens that may be drawn.

Tokens are ordered by descending logit, then by ascending id, and each filter keeps a prefix of this
order. Therefore ties do not depend on a sorting algorithm, and top-k of 1 is greedy. No filter
sorts the vocabulary: top-k selects the largest logits, and top-p sorts only the logits of tokens
that are probable enough to be kept.

A token's weight is proportional to its probability, in float32. The largest weight is 1. A token's
mass is its weight, rounded to a multiple of a power of two. The power is so large that the masses
of the whole vocabulary add up without rounding. Therefore the result does not depend on the order
in which masses are added, and backends/native/cpp/token_filters.h keeps the same tokens by another
algorithm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import Float32Array, Float64Array, Int64Array
from services.worker.sampling.exact_math import exponential

_MOST_BITS_OF_MASS = 40
_DOUBLE_BITS = 53


@dataclass(frozen=True, slots=True)
class Filters:
    """The filter parameters of one request, named as in SamplingParams."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Filters":
        """Creates filters from values in the order of `filter_values`."""
        top_k, *others = values
        return cls(int(top_k), *others)


_NAMES = tuple(field.name for field in fields(Filters))
NUM_ROW_VALUES = 1 + len(_NAMES)
"""The number of sampling parameters of a request: its temperature, then Filters' fields."""


def filter_values(params: SamplingParams) -> tuple[float, ...]:
    return tuple(getattr(params, name) for name in _NAMES)


def best_token_ids(logits: Float32Array, count: int) -> Int64Array:
    """The ids of the `count` largest logits of a row [V], in ascending order. Among equal logits,
    the smallest ids are chosen. NaN is above all numbers.
    """
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
    """Bans all tokens except `token_ids` in a row of logits [V], in place."""
    kept = logits[token_ids]
    logits.fill(-np.inf)
    logits[token_ids] = kept


def kept_token_ids(
    logits: Float32Array, largest: np.float32, temperature: np.float32, filters: Filters
) -> Int64Array | None:
    """The ids, ascending, of the tokens that min-p, then top-k, then top-p keep. None means all.

    `largest`: the largest of the logits [V], finite. `temperature`: above 0. At least one token is
    kept. Top-p is a fraction of the mass of the tokens that min-p and top-k keep. Top-p also keeps
    the token with which this fraction is reached.
    """
    if not (filters.top_k > 0 or filters.top_p < 1 or filters.min_p > 0):
        return None
    weights = exponential((logits - largest) / temperature)
    limit = size = len(logits)
    if filters.min_p > 0:
        limit = int(np.count_nonzero(weights >= np.float32(filters.min_p)))
    if filters.top_k > 0:
        limit = min(limit, filters.top_k)
    kept = best_token_ids(logits, limit) if limit < size else None
    if filters.top_p < 1:
        mass = float(_masses(weights if kept is None else weights[kept], size).sum())
        if kept is None:
            kept = np.flatnonzero(weights > (1 - filters.top_p) * mass / (4 * size))
        falling = np.sort(logits[kept])[::-1]
        masses = _masses(exponential((falling - largest) / temperature), size)
        count = 1 + int(masses.cumsum().searchsorted(filters.top_p * mass))
        kept = kept[best_token_ids(logits[kept], count)]
    return kept


def _masses(weights: Float32Array, vocab_size: int) -> Float64Array:
    bits = min(_MOST_BITS_OF_MASS, _DOUBLE_BITS - (vocab_size - 1).bit_length())
    rounder = math.ldexp(1.5, _DOUBLE_BITS - 1 - bits)
    return weights.astype(np.float64) + rounder - rounder
