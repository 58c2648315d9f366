"""Keys are split if there are many, but too few lanes (parts of chunks) for a GPU."""

import pytest

from services.worker.backends.cuda.sub_chunks import num_splits


@pytest.mark.parametrize(
    ("num_lanes", "num_keys", "splits"),
    [
        (1, 131072, 32),  # the maximum, though 8 * 32 kernel programs are too few
        (1, 4096, 16),  # 16 parts of 256 keys
        (1, 300, 1),
        (4, 8192, 16),  # 16 is the lowest count with at least 2 * 132 programs
        (16, 8192, 4),
        (32, 8192, 1),  # 256 programs without a split
        (1024, 8192, 1),
    ],
)
def test_splits_of_8_key_heads_on_132_processors(
    num_lanes: int, num_keys: int, splits: int
) -> None:
    assert num_splits(num_lanes, 8, num_keys, 132) == splits
