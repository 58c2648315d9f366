"""The benchmark of routing runs with two policies and with decisions, all with small sizes."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.programs import run_program


@pytest.mark.slow
def test_quick_compares_policies_and_times_decisions(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    policies = "cache-aware,round-robin"
    done = run_program("routing", "--quick", "--policies", policies, "--json", file)
    figures = json.loads(file.read_text())
    aware, turns = figures["policies"]
    assert (aware["at_once"], aware["pool_share"]) == (2, 0.25)
    assert (aware["policy"], turns["policy"]) == ("cache-aware", "round-robin")
    assert aware["num_requests"] == turns["num_requests"] == 16
    assert 0 < turns["hit_rate"] < aware["hit_rate"] < 1
    assert 0 < aware["ttft_median_millis"] <= aware["ttft_p99_millis"]
    # The spread is not exactly 1, because some requests are only partly inside the measured time.
    assert 1.0 <= turns["spread"] <= 1.5
    kinds = [decision["kind"] for decision in figures["decisions"]]
    assert kinds == ["keys known", "next turn", "new"]
    assert min(decision["median_millis"] for decision in figures["decisions"]) > 0
    assert "| cache-aware | 0.25 | 2 |" in done.stdout
    assert "| new | 4 |" in done.stdout
