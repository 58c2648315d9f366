"""A chunk of a prompt is cut into lanes. Each query attends to the same keys as before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.backends.cuda.sub_chunks import (
    MOST_QUERIES,
    bucket,
    cut,
    largest_lane,
    seen_by_all,
    seen_by_some,
)

CHUNKS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=5)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_chunk_of_18_tokens_after_10() -> None:
    chunks = cut(ints([18]), ints([28]))
    assert chunks.parents.tolist() == [0, 0]
    assert chunks.ends.tolist() == [12, 28]
    # The first 14 rows are padding. The first lane ends with the first two tokens of the chunk.
    assert chunks.rows.tolist() == list(range(14, 32))
    assert chunks.queries[14:].tolist() == list(range(18))


def test_lanes_without_keys_round_their_number_up_to_a_power_of_two() -> None:
    chunks = cut(ints([16, 17]), ints([16, 17]))
    assert chunks.parents.tolist() == [0, 1, 1, 0]
    assert chunks.ends.tolist() == [16, 1, 17, 0]
    assert len(chunks.queries) == 4 * MOST_QUERIES
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_lanes_are_no_longer_than_the_window() -> None:
    sizes = [largest_lane(window) for window in (None, 4096, 16, 15, 7, 4, 1)]
    assert sizes == [16, 16, 16, 8, 4, 4, 1]


@given(chunks=CHUNKS, window=st.none() | st.integers(1, 60))
def test_every_query_sees_its_keys_once(chunks: list[tuple[int, int]], window: int | None) -> None:
    """The query at position p attends to the keys up to p that are in its window."""
    counts = ints([count for count, _ in chunks])
    seq_lens = counts + ints([past for _, past in chunks])
    size = largest_lane(window)
    lanes = cut(counts, seq_lens, size)
    starts = np.zeros_like(lanes.ends)
    if window is not None:
        starts = seen_by_all(lanes.ends, window).starts
        some = seen_by_some(lanes.ends, window, size)

    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate(
        [np.arange(end - count, end) for count, end in zip(counts, seq_lens, strict=True)]
    )
    assert (lanes.queries[lanes.rows] == np.arange(counts.sum())).all()
    for row, owner, position in zip(lanes.rows, owners, positions, strict=True):
        lane, place = divmod(row, size)
        assert lanes.parents[lane] == owner
        # The kernel's causal mask aligns the lane's last query with the lane's last key.
        seen = list(range(starts[lane], lanes.ends[lane] - size + place + 1))
        if window is not None:
            seen = list(range(some.starts[row], some.ends[row])) + seen
        first = 0 if window is None else max(position - window + 1, 0)
        assert seen == list(range(first, position + 1))
