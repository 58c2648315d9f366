"""The benchmark of 8-bit keys and values runs every load, on a tiny model."""

from pathlib import Path

import torch

from benchmarks.worker.kv_cache import LOADS, build, sizes, table
from services.worker.backends.choices import KVCacheDtype
from services.worker.models.config import DtypeSetting

NUM_STEPS = 3


def test_every_load_is_measured_with_both(random_model: Path) -> None:
    torch.set_num_threads(1)
    workers = [build(random_model, DtypeSetting.FLOAT32, kept, NUM_STEPS) for kept in KVCacheDtype]
    plain, coded = (worker.description.bytes_per_block for worker in workers)
    assert f"{coded / plain:.3f} of them" in sizes(workers)
    assert "int8_per_token_head" in sizes(workers)
    small = [load for load in LOADS if load.num_requests == 1]
    _, _, *rows = table(workers, small, num_rounds=1, num_steps=NUM_STEPS).splitlines()
    for load, row in zip(small, rows, strict=True):
        name, *numbers, spread = (cell.strip() for cell in row.strip("|").split("|"))
        assert name == load.name
        assert all(float(number) > 0 for number in numbers)
        assert len(spread.split(", ")) == 2
