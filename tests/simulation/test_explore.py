"""`stepwell explore`: all services in one process, in virtual time."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def explore(*flags: str, hash_seed: int = 0) -> str:
    """Runs the command in a process of its own. Returns its output."""
    result = subprocess.run(
        [sys.executable, "-m", "services.cli", "explore", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": "gen"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_seed_has_the_same_log_in_every_process() -> None:
    first = explore("--seed", "16", hash_seed=1)
    assert first == explore("--seed", "16", hash_seed=2)
    assert "/stepwell.worker.v1.Worker/Execute" in first


def test_answers_in_a_mixture_equal_the_answers_alone_and_nothing_is_left() -> None:
    assert explore("--seeds", "30").startswith("30 seeds, 0 failed")
