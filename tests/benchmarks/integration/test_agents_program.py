"""The benchmark of agents: its figures, and a quick run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agents.grid import (
    NAMES,
    PRESSURES,
    SHARES,
    Setting,
    grid_table,
    settings,
    summary_table,
)
from benchmarks.agents.ladder import RULES
from benchmarks.agents.loads import LOADS
from benchmarks.agents.rates import (
    BOUNDS,
    NUM_HALVINGS,
    POLICIES,
    UNLIMITED,
    Highest,
    highest_rate,
    rate_table,
    slowdown,
)
from benchmarks.agents.rates import LOADS as RATE_LOADS
from benchmarks.agents.runs import Comparison, Figures
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
    assert one.ratio("program") == pytest.approx(1.0)  # the geometric mean of 2 and 1 / 2
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


def test_the_grid_has_each_load_at_each_pressure() -> None:
    found = list(settings(3, [0], turns=1))
    assert len(found) == len(NAMES) * len(SHARES) * len(PRESSURES)
    table, summary = grid_table(found).splitlines(), summary_table(found).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2::2]] == list(NAMES)
    assert len(summary) == 2 + 4
    for one in found:
        assert one.pressure <= one.wanted_pressure * 1.02  # a pool consists of whole blocks


def test_the_summary_of_a_grid_tells_the_worst_setting() -> None:
    def setting(program: float) -> Setting:
        runs = {"fcfs": figures(8.0), "continuum-fixed": figures(4.0), "program": figures(program)}
        return Setting(
            "swe",
            0.3,
            1.0,
            1.0,
            0,
            {name: replace(run, p99_seconds=run.mean_seconds) for name, run in runs.items()},
        )

    lines = summary_table([setting(2.0), setting(8.0)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0] == ["fcfs", "mean", "2.00", "1.000", "0 of 2"]
    assert cells[2] == ["continuum-fixed", "mean", "1.00", "0.500", "1 of 2"]


def test_a_rate_is_the_highest_at_which_jobs_take_twice_as_long() -> None:
    web = replace(RATE_LOADS[1], num_programs=12, kv_tokens=16_000)
    rate = highest_rate(web, "fcfs", seed=0)
    step = (BOUNDS[1] - BOUNDS[0]) / 2**NUM_HALVINGS
    assert slowdown(replace(web, rate=rate), "fcfs", seed=0) <= 2.0
    assert slowdown(replace(web, rate=rate + step), "fcfs", seed=0) > 2.0
    assert slowdown(replace(web, rate=rate + step), UNLIMITED, seed=0) < 2.0
    found = [Highest("web", 0, policy, rate) for policy in POLICIES]
    table = rate_table([*found, Highest("web", 1, "program", 4 * rate)])
    assert table.endswith("| 1.00 | 2.00 | 1.00 |")
