"""The benchmark of batch-invariant kernels runs every load, on a tiny model."""

from pathlib import Path

import torch

from benchmarks.worker.invariance_price import LOADS, MODES, build, table
from benchmarks.worker.step_timer import StepTimer
from services.worker.models.config import DtypeSetting

NUM_STEPS = 3


def test_every_load_is_measured_in_both_modes(random_model: Path) -> None:
    torch.set_num_threads(1)
    timers = [
        StepTimer(build(random_model, DtypeSetting.FLOAT32, mode, NUM_STEPS), NUM_STEPS)
        for mode in MODES
    ]
    _, _, *rows = table(timers, num_rounds=1).splitlines()
    for load, row in zip(LOADS, rows, strict=True):
        name, without, invariant, price = (cell.strip() for cell in row.strip("|").split("|"))
        assert name == load.name
        assert float(without) > 0
        assert float(invariant) > 0
        assert price.endswith("%")
