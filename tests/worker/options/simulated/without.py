"""Runs a worker, for test_removed_option.py, after the simulated device's code was deleted."""

from pathlib import Path

import pytest

from services.worker.backends.choices import DeviceSetting
from services.worker.backends.device import UnsuitableDevice
from services.worker.build import build_worker
from services.worker.settings import WorkerSettings
from tests.tiny_models import save_tiny_model


def test_a_worker_runs_and_refuses_to_simulate(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    worker = build_worker(WorkerSettings(model=tmp_path, num_blocks=8), "w", lambda: None)
    assert worker.description.num_blocks == 8
    wanted = WorkerSettings(model=tmp_path, device=DeviceSetting.SIMULATED, profile="l4")
    with pytest.raises(UnsuitableDevice, match="--device simulated is not available"):
        build_worker(wanted, "w", lambda: None)
