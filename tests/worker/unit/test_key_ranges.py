"""Which keys queries meet, by their positions."""

import numpy as np
import pytest

from services.worker.backends.torch.key_ranges import (
    BLOCK,
    GRANULE,
    KeyRange,
    Run,
    key_ranges,
    runs,
)


def test_a_query_meets_the_same_keys_however_its_chunk_is_cut() -> None:
    positions = np.arange(3000)
    for window in (None, 1, 17, 64, 200, 1000):
        starts, lengths = key_ranges(positions, window)
        for begin, count in ((0, 3000), (5, 1), (63, 2), (700, 129), (1023, 300)):
            for run in runs(begin, count, window, 128):
                own = slice(begin + run.begin, begin + run.end)
                assert set(starts[own]) == {run.keys.start}
                assert set(lengths[own]) == {run.keys.length}


@pytest.mark.parametrize("window", [None, 1, 17, 64, 65, 200, 512, 1000])
def test_a_range_holds_all_that_is_seen(window: int | None) -> None:
    positions = np.arange(3000)
    starts, lengths = key_ranges(positions, window)
    first = 0 if window is None else np.maximum(positions - window + 1, 0)
    assert (starts <= first).all()
    assert (positions < starts + lengths).all()
    assert (starts % GRANULE == 0).all()
    assert (lengths[lengths > BLOCK] % BLOCK == 0).all()


def test_a_chunk_is_cut_where_the_keys_change() -> None:
    assert runs(60, 70, None, 128) == [
        Run(0, 4, KeyRange(0, 64)),
        Run(4, 68, KeyRange(0, 128)),
        Run(68, 70, KeyRange(0, 192)),
    ]
    assert runs(520, 300, None, 128) == [
        Run(0, 128, KeyRange(0, 1024)),
        Run(128, 256, KeyRange(0, 1024)),
        Run(256, 300, KeyRange(0, 1024)),
    ]
    assert runs(190, 10, 70, 128) == [
        Run(0, 2, KeyRange(0, 192)),
        Run(2, 10, KeyRange(64, 192)),
    ]
