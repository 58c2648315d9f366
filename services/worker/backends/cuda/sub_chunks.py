"""Cuts chunks of tokens into attention calls over lanes of equal length: index arithmetic only.

In a causal call of xFormers' paged kernel all lanes have the same number of queries, at most 16. A
chunk is cut into as many lanes of that size as cover it. It is padded at its front, so that the
last query of each lane is a real one. A lane attends to the keys up to its last query, through its
chunk's block table. The outputs of padding queries are discarded.
"""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.attention import Int32Array, Int64Array

MOST_QUERIES = 16
"""Maximum of queries in a lane that the kernel masks causally."""

MOST_SPLITS = 32
FEWEST_KEYS_PER_SPLIT = 256
ENOUGH_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class SubChunks:
    """Chunks cut into lanes of `size` queries.

    * `parents` int32 [num_lanes]: the chunk of each lane; 0 for a padding lane.
    * `ends` int32 [num_lanes]: keys up to the lane's last query, inclusive; 0 for padding lanes.
    * `queries` int64 [num_lanes * size]: the token of each row of queries, counted over all chunks;
      arbitrary for padding.
    * `rows` int64 [num_tokens]: the row of each token; the inverse of `queries`.
    """

    size: int
    parents: Int32Array
    ends: Int32Array
    queries: Int64Array
    rows: Int64Array


def cut(num_queries: Int32Array, seq_lens: Int32Array, size: int = MOST_QUERIES) -> SubChunks:
    """Cuts chunks of `num_queries`, which end at `seq_lens` keys, into parts of `size` queries.

    The number of lanes is rounded up to a power of two, so that few kernels are compiled.
    """
    padding = -num_queries % size
    counts = (num_queries + padding) // size
    num_lanes = int(counts.sum())
    first_lanes = np.cumsum(counts) - counts
    first_tokens = np.cumsum(num_queries) - num_queries
    parents = np.repeat(np.arange(len(counts)), counts)
    ordinals = np.arange(num_lanes) - first_lanes[parents]
    ends = (seq_lens - num_queries - padding)[parents] + size * (ordinals + 1)

    owners = np.repeat(np.arange(len(counts)), num_queries)
    offsets = np.arange(len(owners)) - first_tokens[owners]
    rows = first_lanes[owners] * size + padding[owners] + offsets

    extra = bucket(num_lanes) - num_lanes
    queries = np.zeros((num_lanes + extra) * size, np.int64)
    queries[rows] = np.arange(len(rows))
    return SubChunks(
        size,
        np.pad(parents, (0, extra)).astype(np.int32),
        np.pad(ends, (0, extra)).astype(np.int32),
        queries,
        rows.astype(np.int64),
    )


def bucket(count: int) -> int:
    """The power of two that `count` is rounded up to; at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def largest_lane(window: int | None) -> int:
    """The maximum of queries in a lane, a power of two, with which each attends to its own key."""
    if window is None or window >= MOST_QUERIES:
        return MOST_QUERIES
    return 1 << (window.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Keys [starts, ends) of each lane, int32 [num_lanes]; both are 0 for a lane without keys."""

    starts: Int32Array
    ends: Int32Array

    @property
    def lengths(self) -> Int32Array:
        """Number of keys of each lane."""
        return self.ends - self.starts


def seen_by_all(ends: Int32Array, window: int) -> KeyRanges:
    """The keys of a causal call with a window: those in the window of the lane's last query.

    Earlier queries of the lane have windows that begin earlier; see `seen_by_some`.
    """
    return KeyRanges(np.maximum(ends - window, 0), ends)


def seen_by_some(ends: Int32Array, window: int, size: int) -> KeyRanges:
    """For each query, as its own lane, the keys of its window before those of `seen_by_all`.

    [num_lanes * size]. Attention over both, combined by their normalizers, equals attention through
    the window.
    """
    positions = (ends[:, None] - size + np.arange(size)).reshape(-1)
    stops = np.repeat(np.maximum(ends - window, 0), size)
    starts = np.maximum(positions - window + 1, 0)
    is_some = (positions >= 0) & (starts < stops)
    return KeyRanges(
        np.where(is_some, starts, 0).astype(np.int32), np.where(is_some, stops, 0).astype(np.int32)
    )


def num_splits(num_lanes: int, num_kv_heads: int, num_keys: int, num_processors: int) -> int:
    """The number of parts into which a lane's keys are split, so that all processors have work.

    The smallest power of two that results in two programs for each processor, limited by the number
    of keys. `num_keys`: of a whole block table, not of a sequence. A call's scratch memory is
    proportional to the number of parts; with xFormers' own choice it can be gigabytes.
    """
    programs, splits = num_lanes * num_kv_heads, 1
    if programs >= ENOUGH_PROGRAMS:
        return 1
    while (
        splits < MOST_SPLITS
        and programs * splits < 2 * num_processors
        and num_keys >= 2 * splits * FEWEST_KEYS_PER_SPLIT
    ):
        splits *= 2
    return splits
