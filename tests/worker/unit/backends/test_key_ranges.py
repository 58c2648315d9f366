"""Which keys each query attends to, by position."""

import numpy as np
import pytest

from services.worker.backends.torch.key_ranges import (
    BLOCK,
    GRANULE,
    FixedRanges,
    KeyRange,
    KeyRanges,
    Run,
    TightRanges,
)

FIXED = FixedRanges(has_softcap=False)
WINDOWS = [None, 1, 17, 64, 65, 200, 512, 1000]


def test_a_query_has_the_same_keys_in_any_chunk() -> None:
    positions = np.arange(3000)
    for window in (None, 1, 17, 64, 200, 1000):
        starts, lengths = FIXED.of_decodes(positions, window)
        for begin, count in ((0, 3000), (5, 1), (63, 2), (700, 129), (1023, 300)):
            for run in FIXED.of_chunk(begin, count, window, 128):
                own = slice(begin + run.begin, begin + run.end)
                assert set(starts[own]) == {run.keys.start}
                assert set(lengths[own]) == {run.keys.length}


@pytest.mark.parametrize("ranges", [FIXED, TightRanges(16)], ids=["fixed", "tight"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_range_contains_all_keys_of_its_queries(ranges: KeyRanges, window: int | None) -> None:
    positions = np.arange(3000)
    starts, lengths = ranges.of_decodes(positions, window)
    first = 0 if window is None else np.maximum(positions - window + 1, 0)
    assert (starts <= first).all()
    assert (positions < starts + lengths).all()
    for run in ranges.of_chunk(700, 300, window, 128):
        assert run.end - run.begin <= 128
        assert run.keys.start <= (0 if window is None else max(700 + run.begin - window + 1, 0))
        assert run.keys.end >= 700 + run.end


@pytest.mark.parametrize("window", WINDOWS)
def test_fixed_ranges_are_whole_blocks(window: int | None) -> None:
    starts, lengths = FIXED.of_decodes(np.arange(3000), window)
    assert (starts % GRANULE == 0).all()
    assert (lengths[lengths > BLOCK] % BLOCK == 0).all()


@pytest.mark.parametrize("window", WINDOWS)
def test_tight_ranges_contain_less_than_a_block_of_unneeded_keys(window: int | None) -> None:
    positions = np.arange(3000)
    starts, lengths = TightRanges(16).of_decodes(positions, window)
    seen = positions + 1 if window is None else np.minimum(positions + 1, window)
    assert (lengths - seen < 16).all()
    assert (starts + lengths == positions + 1).all()


def test_a_chunk_is_cut_where_the_keys_change() -> None:
    assert FIXED.of_chunk(60, 70, None, 128) == [
        Run(0, 4, KeyRange(0, 64)),
        Run(4, 68, KeyRange(0, 128)),
        Run(68, 70, KeyRange(0, 192)),
    ]
    assert FIXED.of_chunk(520, 300, None, 128) == [
        Run(0, 128, KeyRange(0, 1024)),
        Run(128, 256, KeyRange(0, 1024)),
        Run(256, 300, KeyRange(0, 1024)),
    ]
    assert FIXED.of_chunk(190, 10, 70, 128) == [
        Run(0, 2, KeyRange(0, 192)),
        Run(2, 10, KeyRange(64, 192)),
    ]
    assert TightRanges(16).of_chunk(190, 300, 70, 128) == [
        Run(0, 128, KeyRange(112, 206)),
        Run(128, 256, KeyRange(240, 206)),
        Run(256, 300, KeyRange(368, 122)),
    ]
