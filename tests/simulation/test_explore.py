"""`stepwell explore`: all services in one process, in virtual time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER_PYTHON = os.environ.get("OTHER_PYTHON", "")
"""A Python interpreter of another version with the packages of `make test`, or empty."""
RICH_SEED = "397"
"""A simulation with most kinds of requests and services, two ranks, and Redis."""


def explore(
    *flags: str, python: str = sys.executable, hash_seed: int = 0, temporary: Path | None = None
) -> str:
    """Runs `stepwell explore` in a process of its own. Returns its output."""
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": "gen"}
    if temporary is not None:
        environ["TMPDIR"] = str(temporary)
    result = subprocess.run(
        [python, "-m", "services.cli", "explore", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_seed_has_the_same_log_in_every_process() -> None:
    first = explore("--seed", RICH_SEED, hash_seed=1)
    assert first == explore("--seed", RICH_SEED, hash_seed=2)
    assert "/stepwell.worker.v1.Worker/Execute" in first


@pytest.mark.skipif(not OTHER_PYTHON, reason="OTHER_PYTHON names no other interpreter")
def test_a_seed_has_the_same_log_with_another_version_of_python() -> None:
    other = explore("--seed", RICH_SEED, python=OTHER_PYTHON)
    assert explore("--seed", RICH_SEED) == other


def test_no_seeds_are_refused() -> None:
    with pytest.raises(AssertionError, match="--seeds must be at least 1"):
        explore("--seeds", "0")


def test_answers_in_a_mixture_equal_the_answers_alone_and_nothing_is_left(tmp_path: Path) -> None:
    assert explore("--seeds", "24", temporary=tmp_path).startswith("24 seeds, 0 failed")
    assert list(tmp_path.iterdir()) == []
