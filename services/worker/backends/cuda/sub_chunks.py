"""Chunks of tokens as attention calls over lanes of equal length: index arithmetic only.

A causal call of xFormers' paged kernel has the same number of queries, at most 16, in every lane. A
chunk is cut into as many lanes of that size as cover it, padded in front, so that the last query of
each lane is a real one. A lane sees the keys up to its last query, through its chunk's block table.
The outputs of padding queries are discarded.
"""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.attention import Int32Array, Int64Array

MOST_QUERIES = 16
"""Most queries of a lane that the kernel masks causally."""

MOST_SPLITS = 32
FEWEST_KEYS_PER_SPLIT = 256
ENOUGH_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class SubChunks:
    """Chunks cut into lanes of `size` queries.

    * `parents` int32 [num_lanes]: the chunk that each lane is a part of; 0 for a padding lane.
    * `ends` int32 [num_lanes]: keys up to and with the lane's last query; 0 for a padding lane.
    * `queries` int64 [num_lanes * size]: which token each row of queries is, counted over all
      chunks; any token for padding.
    * `rows` int64 [num_tokens]: which row each token is; the inverse of `queries`.
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
    """The most queries of a lane, a power of two, with which each still sees its own key."""
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
        """Keys of each lane."""
        return self.ends - self.starts


def seen_by_all(ends: Int32Array, window: int) -> KeyRanges:
    """The keys of a causal call with a window: those that the lane's last query sees.

    The window of any earlier query of the lane reaches back further; see `seen_by_some`.
    """
    return KeyRanges(np.maximum(ends - window, 0), ends)


def seen_by_some(ends: Int32Array, window: int, size: int) -> KeyRanges:
    """For each query, as a lane of its own, the keys of its window before those of `seen_by_all`.

    [num_lanes * size]. Attention over both, joined by their normalizers, is attention through the
    window.
    """
    positions = (ends[:, None] - size + np.arange(size)).reshape(-1)
    stops = np.repeat(np.maximum(ends - window, 0), size)
    starts = np.maximum(positions - window + 1, 0)
    is_some = (positions >= 0) & (starts < stops)
    return KeyRanges(
        np.where(is_some, starts, 0).astype(np.int32), np.where(is_some, stops, 0).astype(np.int32)
    )


def num_splits(num_lanes: int, num_kv_heads: int, num_keys: int, num_processors: int) -> int:
    """The number of parts into which a lane's keys are split, so that every processor has work.

    The smallest power of two that makes two programs for each processor, as far as there are enough
    keys. `num_keys` are those of a whole table, not of a sequence. The scratch memory of a call
    grows with the number; with xFormers' own choice it can take gigabytes.
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
