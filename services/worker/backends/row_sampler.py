"""The interface for drawing a token from a row of logits, in NumPy or by compiled kernels."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

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

    values: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> "RowParameters":
        return RowParameters(self.values.take(rows, 1), self.seeds[rows], self.positions[rows])


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The allowed tokens of R rows, in contiguous arrays.

    `words`, int32 [n, V / 32, rounded up]: bit i of a row, lowest bits first, is 0 if token i is
    banned. `rows`, int64 [R]: indexes in `words`, or -1 if all tokens are allowed.
    """

    words: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> "RowMasks":
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
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        parameters: RowParameters,
        masks: RowMasks | None = None,
    ) -> npt.NDArray[np.int64]:
        """Returns a token for each row, or UNUSABLE or REFUSED in place of a token."""

    def copy(
        self,
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        masks: RowMasks | None,
        copies: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.bool_]:
        """Copies the rows to `copies` [R, V], with minus infinity for banned tokens. Returns
        whether each row would have a token to sample without its mask.
        """
