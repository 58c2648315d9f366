"""The soak runs: all of it, for some seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny import save_servable_model

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.soak", "endurance"]


@pytest.mark.slow
def test_a_short_soak_asks_everything_and_finds_all_blocks_free(tmp_path: Path) -> None:
    save_servable_model(tmp_path)
    # In so short a time everything still grows into its place.
    flags = ["--minutes", "0.1", "--model", tmp_path, "--growth-mb-per-hour", "100000"]
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for process in ("gateway", "scheduler", "kvpool", "worker"):
        assert f"| {process} | " in done.stdout
    assert ", 0 went wrong; " in done.stdout
    assert "at the end all blocks are free and no request is left" in done.stdout
    assert " 0 preemptions" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--minutes", "0"], "argument --minutes: must be above 0"),
        (["--model", "no/such"], "no/such is not a model directory"),
    ],
)
def test_what_cannot_be_run_is_refused(flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert complaint in done.stderr
