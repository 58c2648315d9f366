"""The interface for drawing a token from a row of logits, in NumPy or by compiled kernels."""

from dataclasses import dataclass
from typing import Protocol

from services.worker.backends.arrays import (
    BoolArray,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)

UNUSABLE = -1
"""Returned in place of a token if the row contains NaN, or if its largest logit is not finite."""
REFUSED = -2
"""Returned in place of a token if the row has tokens to draw, but its mask allows none of them."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Sampling parameters of R rows, in contiguous arrays.

    `values`, float64 [n, R]: temperatures, then the fields of Filters in sampling/filters.py. A
    temperature of 0 selects the token with the largest logit, and the lowest id among equals.
    `seeds`: uint64 [R]. `positions`, int64 [R]: positions of the tokens in their sequences.
    """

    values: Float64Array
    seeds: UInt64Array
    positions: Int64Array

    def of(self, rows: Int64Array) -> "RowParameters":
        return RowParameters(self.values.take(rows, 1), self.seeds[rows], self.positions[rows])


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The allowed tokens of R rows, in contiguous arrays.

    `words`, int32 [n, V / 32, rounded up]: bit i of a row, lowest bits first, is 0 if token i is
    banned. `rows`, int64 [R]: indexes in `words`, or -1 if all tokens are allowed.
    """

    words: Int32Array
    rows: Int64Array

    def of(self, rows: Int64Array) -> "RowMasks":
        return RowMasks(self.words, self.rows[rows])


class RowSampler(Protocol):
    """Draws tokens from rows of logits float32 [n, V], at the indexes `rows`, int64 [R]. The result
    for a row depends only on that row, and is the same for every implementation.

    `draws_ahead`: whether sampling many rows takes little longer than sampling one. Then rows are
    sampled together although some of them may not be needed.
    """

    draws_ahead: bool

    def sample(
        self,
        logits: Float32Array,
        rows: Int64Array,
        parameters: RowParameters,
        masks: RowMasks | None = None,
    ) -> Int64Array:
        """Returns a token for each row, or UNUSABLE or REFUSED in place of a token."""

    def copy(
        self, logits: Float32Array, rows: Int64Array, masks: RowMasks | None, copies: Float32Array
    ) -> BoolArray:
        """Copies the rows to `copies` [R, V], with minus infinity for banned tokens. Returns
        whether each row would have a token to sample without its mask.
        """
