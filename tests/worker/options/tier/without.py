"""Runs a worker, for test_removed_option.py, after the code of the host-memory tier was deleted."""

from pathlib import Path

import pytest

from services.worker.build import build_worker
from services.worker.core.errors import NoTier
from services.worker.settings import WorkerSettings
from tests.tiny_models import save_tiny_model


def test_a_worker_runs_and_refuses_a_tier(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    worker = build_worker(WorkerSettings(model=tmp_path, num_blocks=8), "w", lambda: None)
    assert worker.description.num_tier_blocks == 0
    wanted = WorkerSettings(model=tmp_path, num_blocks=8, kv_offloading_size=1.0)
    with pytest.raises(NoTier, match="does not support offloaded blocks"):
        build_worker(wanted, "w", lambda: None)
