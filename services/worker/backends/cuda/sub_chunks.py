"""Cuts chunks of tokens into lanes (groups of queries) of equal length, for attention calls.
Computes only indexes.

In a causal call of xFormers' paged kernel all lanes have the same number of queries, at most 16. A
chunk is cut into lanes of this size. It is padded at the front, so that the last query of each lane
is not padding. A lane attends to the keys up to its last query, through the chunk's block table.
The outputs of padding queries are discarded.
"""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.arrays import Int32Array, Int64Array

MOST_QUERIES = 16
"""Maximum number of queries in a lane of a causal call."""

MOST_SPLITS = 32
FEWEST_KEYS_PER_SPLIT = 256
ENOUGH_PROGRAMS = 256

_MOST_GRID_ROWS = 65535
"""CUDA's limit on the second axis of a grid. The kernel has a row for each lane and KV head."""
_MOST_INDEX = 2**31 - 1
"""xFormers numbers the keys of all lanes' block tables in int32."""


@dataclass(frozen=True, slots=True)
class SubChunks:
    """Chunks cut into lanes of `size` queries.

    * `parents` int32 [num_lanes]: the chunk of each lane; 0 for a padding lane.
    * `ends` int32 [num_lanes]: the number of keys up to and including the key of the lane's last
      query; 0 for padding lanes.
    * `queries` int64 [num_lanes * size]: the index of each query's token, counted over all chunks;
      arbitrary for padding.
    * `rows` int64 [num_tokens]: the index of each token's query in `queries`.
    """

    size: int
    parents: Int32Array
    ends: Int32Array
    queries: Int64Array
    rows: Int64Array


def cut(num_queries: Int32Array, seq_lens: Int32Array, size: int = MOST_QUERIES) -> SubChunks:
    """Cuts chunks into lanes of `size` queries. Chunk i has `num_queries[i]` queries, and its last
    query attends to `seq_lens[i]` keys.

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
    """Rounds `count` up to a power of two. The result is at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def most_lanes(rows_each: int, num_keys: int) -> int:
    """The maximum number of lanes in a call, a power of two. `rows_each` is the number of grid rows
    of a lane, and `num_keys` the number of keys of a block table.
    """
    most = min(_MOST_GRID_ROWS // rows_each, _MOST_INDEX // num_keys)
    return 1 << max(most.bit_length() - 1, 0)


def largest_lane(window: int | None) -> int:
    """The largest number of queries in a lane, a power of two, whose own keys are in its range."""
    if window is None or window >= MOST_QUERIES:
        return MOST_QUERIES
    return 1 << (window.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """The keys [starts, ends) of each lane, int32 [num_lanes]. Lanes without keys have 0 and 0."""

    starts: Int32Array
    ends: Int32Array

    @property
    def lengths(self) -> Int32Array:
        return self.ends - self.starts


def seen_by_all(ends: Int32Array, window: int) -> KeyRanges:
    """The key ranges of a causal call with an attention window. The range of a lane is the window
    of its last query. `seen_by_some` returns the keys before this range that earlier queries attend
    to.
    """
    return KeyRanges(np.maximum(ends - window, 0), ends)


def seen_by_some(ends: Int32Array, window: int, size: int) -> KeyRanges:
    """For each query, as a lane of its own, the keys in its window that precede the range of
    `seen_by_all`.

    The result has num_lanes * size ranges. Attention over the ranges of both functions, combined by
    their normalizers, equals attention with the window.
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

    The number is the smallest power of two that results in two programs for each processor, limited
    by the number of keys. `num_keys` is the number of keys of a whole block table, not of a
    sequence. A call's scratch memory is proportional to the number of parts. With the number that
    xFormers would choose, it can be gigabytes.
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
