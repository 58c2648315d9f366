"""The benchmark of a step's overhead runs completely, with small sizes."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.programs import run_program

PROCESSES = {"worker", "kvpool", "scheduler", "client"}


@pytest.mark.slow
def test_quick_measures_a_step_in_every_process(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run_program("step", "--quick", "--running", 4, "--json", figures)
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
