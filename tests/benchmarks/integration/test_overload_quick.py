"""The benchmark of overload runs, for some seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny import save_servable_model

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.soak", "overload"]


@pytest.mark.slow
def test_a_short_overload_is_served_and_refused(tmp_path: Path) -> None:
    save_servable_model(tmp_path)
    flags = ["--seconds", "3", "--concurrency", "4", "--deadline-seconds", "1", "--model", tmp_path]
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| goodput to capacity | " in done.stdout
    assert "| refusals, ms, median / p99 | " in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--factor", "0"], "argument --factor: must be above 0"),
        (["--model", "no/such"], "no/such is not a model directory"),
    ],
)
def test_what_cannot_be_run_is_refused(flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert complaint in done.stderr
