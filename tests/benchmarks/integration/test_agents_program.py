"""The benchmark of agents: its figures, and a quick run."""

import json
from pathlib import Path

import pytest

from benchmarks.agents.__main__ import LOADS, Comparison, Figures
from benchmarks.agents.ladder import RULES
from tests.benchmarks.programs import run_program


def figures(mean_seconds: float, context_tokens: float = 0.0) -> Figures:
    return Figures(mean_seconds, 0.0, 0.0, 0.0, 0.0, context_tokens)


def test_a_ratio_is_the_geometric_mean_over_the_seeds() -> None:
    rows = {
        "fcfs": [figures(100.0), figures(90.0)],
        "program": [figures(50.0), figures(180.0)],
        "unlimited memory": [figures(20.0, 100_000), figures(30.0, 300_000)],
    }
    one = Comparison(LOADS[0], rows)
    assert one.ratio("program") == pytest.approx(1.0)  # of 2 and 1 / 2
    assert one.pressure == pytest.approx(200_000 / one.load.kv_tokens)


@pytest.mark.slow
def test_a_quick_run_prints_all_loads_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    done = run_program("agents", "--simulated", "--quick", "--json", path)
    ratios, details = done.stdout.strip().split("\n\n")[1:]
    assert len(ratios.splitlines()) == 2 + len(LOADS)
    found = json.loads(path.read_text())
    rows = list(found[0]["rows"])
    assert {"fcfs", "program", "unlimited memory", "known work"} <= set(rows)
    num_rows = sum(len(one["rows"]) for one in found)
    assert len(details.splitlines()) == 2 + num_rows > len(LOADS) * len(rows) - 3
    for one in found:
        (unlimited,) = one["rows"]["unlimited memory"]
        assert ("fcfs, tier" in one["rows"]) is bool(one["load"]["tier_tokens"])
        for (run,) in one["rows"].values():
            assert run["mean_seconds"] > 0.95 * unlimited["mean_seconds"]


@pytest.mark.slow
def test_the_ladder_has_a_row_for_each_rule() -> None:
    done = run_program("agents", "--simulated", "--quick", "--ladder", "--load", "web")
    ratios = done.stdout.strip().split("\n\n")[1]
    rules = [line.split(" | ")[0].removeprefix("| ") for line in ratios.splitlines()[2:]]
    assert rules == ["program", *RULES]
