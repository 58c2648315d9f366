"""Over which keys a query is attended to: a function of its position alone.

Sums over keys run in blocks, and where blocks end decides the last bits of what comes out. So the
query at one position always meets the same range of keys, cut into blocks in the same way, whether
it is a decode or part of a chunk, and whatever is in the step with it. Keys of the range that it
does not see are masked, and add zeros. A range begins and ends at multiples of GRANULE tokens.

Up to BLOCK keys are one block, of one of LENGTHS; more are blocks of BLOCK keys, to which any
number of masked ones may be added.
"""

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
        """Behind its last key."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Run:
    """Queries [begin, end) of a chunk, counted from its first, that meet the same keys."""

    begin: int
    end: int
    keys: KeyRange


def key_ranges(
    positions: Int32Array | Int64Array, window: int | None
) -> tuple[Int64Array, Int64Array]:
    """Starts and lengths of the ranges of queries at these positions, [n] each.

    `window`: the widest that the queries are attended to through; None: they see everything.
    """
    granules = positions.astype(np.int64) // GRANULE
    starts = np.zeros_like(granules)
    if window is not None:
        starts = np.maximum(granules * GRANULE - window + 1, 0) // GRANULE * GRANULE
    needed = (granules + 1) * GRANULE - starts
    short = LENGTHS[np.minimum(np.searchsorted(LENGTHS, needed), len(LENGTHS) - 1)]
    return starts, np.where(needed <= BLOCK, short, -(-needed // BLOCK) * BLOCK)


def runs(context: int, num_queries: int, window: int | None, most: int) -> list[Run]:
    """Cuts a chunk behind `context` tokens into runs of `most` queries and less."""
    starts, lengths = key_ranges(np.arange(context, context + num_queries), window)
    changes = np.flatnonzero((np.diff(starts) != 0) | (np.diff(lengths) != 0)) + 1
    found = []
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), num_queries], strict=True):
        keys = KeyRange(int(starts[begin]), int(lengths[begin]))
        found += [Run(x, min(x + most, end), keys) for x in range(begin, end, most)]
    return found
