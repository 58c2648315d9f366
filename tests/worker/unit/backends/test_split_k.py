"""Keys are split if there are many, but too few lanes (parts of chunks) for a GPU."""

import pytest

from services.worker.backends.cuda.sub_chunks import num_splits


@pytest.mark.parametrize(
    ("num_lanes", "num_keys", "splits"),
    [
        (1, 131072, 32),
        (1, 4096, 16),
        (1, 300, 1),
        (4, 8192, 16),
        (16, 8192, 4),
        (32, 8192, 1),
        (1024, 8192, 1),
    ],
)
def test_splits_of_8_key_heads_on_132_processors(
    num_lanes: int, num_keys: int, splits: int
) -> None:
    assert num_splits(num_lanes, 8, num_keys, 132) == splits
