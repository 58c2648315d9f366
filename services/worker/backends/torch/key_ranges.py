"""The ranges of keys that queries read, and the queries of a chunk that share an attention call.

Sums over keys are computed in blocks, and block boundaries determine the last bits of the result.
With FixedRanges the range of a query is a function of its position only. The result of a query then
does not depend on whether it is a decode or part of a chunk, or on other queries in the step. Keys
in the range that a query does not attend to are masked, and add zeros. With TightRanges, ranges
have no more keys than needed. This is less work, but the last bits of a result depend on the step.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from services.worker.backends.arrays import Int32Array, Int64Array

GRANULE = 64
LENGTHS = np.array((64, 128, 192, 256, 384, 512))
BLOCK = 512


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys [start, start + length) of a sequence. Keys after the sequence's end are masked."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Run:
    """Queries [begin, end) of a chunk, counted from its first query, with the same range `keys`."""

    begin: int
    end: int
    keys: KeyRange


class FixedRanges:
    """Ranges that begin and end at multiples of GRANULE tokens.

    A range of up to BLOCK keys is one block, whose length is one of LENGTHS. A longer range
    consists of blocks of BLOCK keys. Additional blocks of masked keys do not change results. With
    `has_softcap`, scores are computed over whole ranges, so only ranges of equal length may share a
    call.
    """

    def __init__(self, *, has_softcap: bool) -> None:
        self._has_softcap = has_softcap

    def of_decodes(
        self, positions: Int32Array | Int64Array, window: int | None
    ) -> tuple[Int64Array, Int64Array]:
        """Returns the starts and lengths, [n] each, of the ranges of single queries at these
        positions. `window` is the widest of the layers' windows, or None for full attention.
        """
        granules = positions.astype(np.int64) // GRANULE
        starts = np.zeros_like(granules)
        if window is not None:
            starts = np.maximum(granules * GRANULE - window + 1, 0) // GRANULE * GRANULE
        needed = (granules + 1) * GRANULE - starts
        short = LENGTHS[np.minimum(np.searchsorted(LENGTHS, needed), len(LENGTHS) - 1)]
        return starts, np.where(needed <= BLOCK, short, -(-needed // BLOCK) * BLOCK)

    def of_chunk(self, context: int, num_queries: int, window: int | None, most: int) -> list[Run]:
        """Cuts a chunk that follows `context` tokens into runs of at most `most` queries. Each
        query has the range that it would have as a decode.
        """
        starts, lengths = self.of_decodes(np.arange(context, context + num_queries), window)
        changes = np.flatnonzero((np.diff(starts) != 0) | (np.diff(lengths) != 0)) + 1
        found = []
        cuts = [0, *changes.tolist(), num_queries]
        for begin, end in itertools.pairwise(cuts):
            keys = KeyRange(int(starts[begin]), int(lengths[begin]))
            found += [Run(x, min(x + most, end), keys) for x in range(begin, end, most)]
        return found

    def may_share(self, shorter: int, longer: int) -> bool:
        """Whether decodes with `shorter` and `longer` keys may share a call over `longer` keys,
        because their ranges have blocks of equal lengths.
        """
        if shorter == longer:
            return True
        return not self._has_softcap and shorter >= BLOCK and BLOCK <= longer <= 2 * shorter


class TightRanges:
    """Like FixedRanges, for ranges from the first block in the window to the last key."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def of_decodes(
        self, positions: Int32Array | Int64Array, window: int | None
    ) -> tuple[Int64Array, Int64Array]:
        positions = positions.astype(np.int64)
        starts = np.zeros_like(positions)
        if window is not None:
            size = self._block_size
            starts = np.maximum(positions - window + 1, 0) // size * size
        return starts, positions + 1 - starts

    def of_chunk(self, context: int, num_queries: int, window: int | None, most: int) -> list[Run]:
        found = []
        for begin in range(0, num_queries, most):
            end = min(begin + most, num_queries)
            [start], _ = self.of_decodes(np.array([context + begin]), window)
            found.append(Run(begin, end, KeyRange(int(start), context + end - int(start))))
        return found

    def may_share(self, shorter: int, longer: int) -> bool:
        """Whether the shorter range would be padded to at most twice its length."""
        return longer <= 2 * shorter


KeyRanges = FixedRanges | TightRanges
"""The strategies that choose key ranges."""
