"""The draw of a token from a row of logits, which kernels may have compiled code for."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

UNUSABLE = -1
"""Stands for a token that cannot be sampled: of a row with NaN, or whose largest logit is not
finite.
"""
REFUSED = -2
"""Stands for a token of a row in which a mask leaves none, though without it there is one."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """How tokens are drawn, of R rows.

    `values`, float64 [n, R]: temperatures (0: the best token, the lowest id among equals), then the
    fields of Filters in sampling/filters.py. `seeds`, uint64 [R]. `positions`, int64 [R]: of the
    tokens in their sequences. All are contiguous.
    """

    values: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> "RowParameters":
        """The parameters of some rows."""
        return RowParameters(self.values.take(rows, 1), self.seeds[rows], self.positions[rows])


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which tokens may be drawn, of R rows.

    `words`, int32 [n, V / 32, rounded up]: bit i of a row's words, from the lowest on, is 0 if
    token i may not. `rows`, int64 [R]: indexes of `words`, -1 for a row in which all may. Both are
    contiguous.
    """

    words: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> "RowMasks":
        """The masks of some rows."""
        return RowMasks(self.words, self.rows[rows])


class RowSampler(Protocol):
    """Draws tokens from rows of logits float32 [n, V]: those at the indexes `rows`, int64 [R]. What
    it gives for a row depends on that row alone, and is the same for every implementation.

    `draws_ahead`: whether many rows take little longer than one, so that rows may be sampled that
    are perhaps not needed.
    """

    draws_ahead: bool

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        parameters: RowParameters,
        masks: RowMasks | None = None,
    ) -> npt.NDArray[np.int64]:
        """A token of each row, UNUSABLE, or REFUSED."""

    def copy(
        self,
        logits: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        masks: RowMasks | None,
        copies: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.bool_]:
        """Writes the rows to `copies` [R, V], with minus infinity for the tokens that may not be
        drawn. Returns for each row whether there is a token to sample in it without the mask.
        """
