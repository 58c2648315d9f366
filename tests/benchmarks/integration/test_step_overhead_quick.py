"""The benchmark of a step's overhead runs: all of it, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.step"]
PROCESSES = {"worker", "kvpool", "scheduler", "client"}


@pytest.mark.slow
def test_quick_measures_a_step_from_all_sides(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--quick", "--running", "4", "--json", figures]
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())
    rows = results["rows"]
    assert [(row["step_millis"], row["mode"]) for row in rows] == [
        *((0, "async"), (0, "sync")),
        *((5, "async"), (5, "sync")),
    ]
    for row in rows:
        assert row["running"] == 4
        assert row["median_micros"] >= 1000 * row["step_millis"]
        assert set(row["processor_micros"]) == PROCESSES
        assert min(row["processor_micros"].values()) > 0
        assert (row["ratio"] is None) == (row["step_millis"] == 0)
    hops = results["hops"]["4"]
    assert hops["scheduler: plan, the pool's answer aside"] > 0
    assert hops["scheduler ↔ worker: a step there and its answer back"] > 0
    assert "| 4 | async |" in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--running", "0"], "argument --running"),
        (["--rounds", "none"], "argument --rounds"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert complaint in done.stderr
