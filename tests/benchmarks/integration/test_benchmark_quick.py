"""The benchmark runs: all of it, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny import save_servable_model

ROOT = Path(__file__).parents[3]
SIDES = ["one process", "services, gRPC", "services, HTTP"]
COMMAND = [sys.executable, "-m", "benchmarks.serving"]


@pytest.mark.slow
def test_quick_measures_everything_and_says_the_same_in_json(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    save_servable_model(model)
    figures = tmp_path / "figures.json"
    flags = ["--quick", "--model", model, "--concurrency", "2", "--json", figures]
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())
    measured = results["models"]["tiny"]
    rows = measured["serving"]
    assert [row["side"] for row in rows] == SIDES
    assert all(row["concurrency"] == 2 for row in rows)
    assert all(row["figures"]["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
    assert {"gateway", "scheduler", "kvpool", "worker", "client"} == set(
        rows[1]["processor_micros"]
    )
    hops = measured["hops"]["2"]
    assert hops["worker: forward and sampling"] > 0
    assert hops["whole step, from its planning to its tokens"] > 0
    assert [row["side"] for row in measured["tracing"]] == ["off", "100%"]
    work = measured["span_work"]
    assert work["off"]["2"]["scheduler"] < work["100%"]["2"]["scheduler"]
    for side in SIDES:
        assert f"| 2 | {side} |" in done.stdout
    assert "hop by hop" in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "no/such"], "no/such is neither a model directory nor one of"),
        (["--concurrency", "0"], "argument --concurrency"),
        (["--concurrency", "many"], "argument --concurrency"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert complaint in done.stderr
