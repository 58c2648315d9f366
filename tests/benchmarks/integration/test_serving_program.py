"""The benchmark of serving runs completely, with small sizes."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.programs import run_program

TARGETS = ["one process", "services, gRPC", "services, HTTP"]


@pytest.mark.slow
def test_two_stages_are_measured_beside_one_worker(tmp_path: Path, servable_model: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ("--quick", "--stages", "--model", servable_model, "--concurrency", 2)
    done = run_program("serving", *flags, "--json", figures)
    rows = json.loads(figures.read_text())["models"]["tiny"]["stages"]
    names = ["one worker", "two stages"]
    assert [row["target"] for row in rows] == names
    assert all(row["figures"]["tokens_per_second"] > 0 for row in rows)
    workers = [sum("worker" in name for name in row["processor_micros"]) for row in rows]
    assert workers == [1, 2]
    for name in names:
        assert f"| 2 | {name} |" in done.stdout


@pytest.mark.slow
def test_unconstrained_requests_are_measured_beside_constrained_ones(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ("--quick", "--structured", "--model", "models/demo", "--concurrency", 2)
    done = run_program("serving", *flags, "--json", figures)
    rows = json.loads(figures.read_text())["models"]["demo"]["structured"]
    names = ["beside unconstrained ones", "beside constrained ones"]
    assert [row["target"] for row in rows] == names
    assert all(row["figures"]["tpot_mean"] > 0 for row in rows)
    assert rows[0]["tpot_ratio"] == 1
    assert rows[1]["tpot_ratio"] > 0
    for name in names:
        # One table has the throughput, the other the processor time.
        assert done.stdout.count(f"| 2 | {name} |") == 2


@pytest.mark.slow
def test_quick_measures_everything_and_writes_the_same_as_json(
    tmp_path: Path, servable_model: Path
) -> None:
    figures = tmp_path / "figures.json"
    flags = ("--quick", "--model", servable_model, "--concurrency", 2, "--json", figures)
    done = run_program("serving", *flags)
    results = json.loads(figures.read_text())
    measured = results["models"]["tiny"]
    rows = measured["serving"]
    assert [row["target"] for row in rows] == TARGETS
    assert all(row["concurrency"] == 2 for row in rows)
    assert all(row["figures"]["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
    assert {"gateway", "scheduler", "kvpool", "worker", "client"} == set(
        rows[1]["processor_micros"]
    )
    hops = measured["hops"]["2"]
    assert hops["worker: forward and sampling"] > 0
    assert hops["whole step, from its planning to its tokens"] > 0
    assert [row["target"] for row in measured["tracing"]] == ["off", "100%"]
    work = measured["span_work"]
    assert work["off"]["2"]["scheduler"] < work["100%"]["2"]["scheduler"]
    for target in TARGETS:
        assert f"| 2 | {target} |" in done.stdout
    assert "hop by hop" in done.stdout
