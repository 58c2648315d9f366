"""The keys that a query is attended to over, and the queries of a chunk that share a call.

Sums over keys run in blocks, and where blocks end decides the last bits of the result. FixedRanges
makes the range of a query a function of its position alone: the query at one position always has
the same keys, cut into blocks in the same way, whether it is a decode or part of a chunk, and
whatever else is in the step. Keys of the range that it does not see are masked, and add zeros.
TightRanges takes no more keys than are seen, which is less work, and lets the last bits depend on
the step.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from services.worker.backends.attention import Int32Array, Int64Array

GRANULE = 64
LENGTHS = np.array((64, 128, 192, 256, 384, 512))
BLOCK = 512


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys [start, start + length) of a sequence; those past its end count as masked."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """One past its last key."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Run:
    """Queries [begin, end) of a chunk, counted from its first, over the same keys."""

    begin: int
    end: int
    keys: KeyRange


class FixedRanges:
    """Ranges begin and end at multiples of GRANULE tokens.

    Up to BLOCK keys are one block, of one of LENGTHS; more are blocks of BLOCK keys, to which any
    number of masked ones may be added. Capped scores are computed over whole ranges, so that
    `has_softcap` allows equally long ranges alone to share a call.
    """

    def __init__(self, *, has_softcap: bool) -> None:
        self._has_softcap = has_softcap

    def of_decodes(
        self, positions: Int32Array | Int64Array, window: int | None
    ) -> tuple[Int64Array, Int64Array]:
        """Starts and lengths of the ranges of single queries at these positions, [n] each.
        `window`: the widest of the layers' windows; None: queries see all keys before them.
        """
        granules = positions.astype(np.int64) // GRANULE
        starts = np.zeros_like(granules)
        if window is not None:
            starts = np.maximum(granules * GRANULE - window + 1, 0) // GRANULE * GRANULE
        needed = (granules + 1) * GRANULE - starts
        short = LENGTHS[np.minimum(np.searchsorted(LENGTHS, needed), len(LENGTHS) - 1)]
        return starts, np.where(needed <= BLOCK, short, -(-needed // BLOCK) * BLOCK)

    def of_chunk(self, context: int, num_queries: int, window: int | None, most: int) -> list[Run]:
        """Cuts a chunk that follows `context` tokens into runs of at most `most` queries. Each has
        the keys that it would have as a decode.
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
        """Whether decodes over `shorter` and over `longer` keys may be one call, over the longer
        number: not if the ranges end in blocks of different lengths.
        """
        if shorter == longer:
            return True
        return not self._has_softcap and shorter >= BLOCK and BLOCK <= longer <= 2 * shorter


class TightRanges:
    """Ranges begin with the first block that is seen, and end with the last query's own key. For
    the methods see FixedRanges.
    """

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
        """See FixedRanges. The keys of one are padded to less than twice as many."""
        return longer <= 2 * shorter


KeyRanges = FixedRanges | TightRanges
"""What chooses the keys of an attention call."""
