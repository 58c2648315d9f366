"""`stepwell simulate` from its arguments to its output."""

import json
from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.simulate import main

SMALL = [
    *("--programs", "6", "--rate", "1", "--scale", "0.01", "--kv-tokens", "4000"),
    *("--max-num-batched-tokens", "512"),
]


def test_a_seed_fixes_every_byte_of_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name, seed in (("first", "3"), ("again", "3"), ("other", "4")):
        path = tmp_path / name
        assert main([*SMALL, "--seed", seed, "--json", str(path)]) == 0
        texts.append((capsys.readouterr().out, path.read_bytes()))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_there_is_a_row_for_each_pair_of_policies_and_the_optimum(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    policies = ["--policy", "fcfs", "--policy", "priority"]
    routings = ["--routing", "round-robin", "--routing", "least-loaded", "--replicas", "2"]
    assert main([*SMALL, *policies, *routings, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "fcfs, round-robin",
        "priority, round-robin",
        "fcfs, least-loaded",
        "priority, least-loaded",
        "optimum (offline)",
    ]
    assert all(row["num_jobs"] == 6 for row in rows)


def test_the_bounds_are_no_worse_than_the_policies(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    crowd = ["--workload", "swe", "--programs", "30", "--rate", "1.5", "--scale", "0.1"]
    limits = ["--kv-tokens", "6000", "--max-num-batched-tokens", "512", "--no-optimum", "--bounds"]
    assert main([*crowd, *limits, "--json", str(path)]) == 0
    rows = {row["name"]: row["job_time"] for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["fcfs", "unlimited memory", "known work"]
    fcfs, unlimited, known = (row["job_seconds_mean"] for row in rows.values())
    assert unlimited <= known < fcfs


def test_a_tier_keeps_what_the_pools_evict(tmp_path: Path) -> None:
    crowd = ["--workload", "swe", "--programs", "30", "--rate", "3", "--scale", "0.1"]
    limits = ["--kv-tokens", "4000", "--max-num-batched-tokens", "512"]
    policies = ["--policy", "fcfs", "--policy", "program", "--replicas", "2"]
    evicted = {}
    for tier in (), ("--tier-tokens", "40000"):
        path = tmp_path / "out.json"
        assert main([*crowd, *limits, *policies, *tier, "--json", str(path)]) == 0
        rows = json.loads(path.read_text())["rows"]
        evicted[tier] = [row["waste"]["wasted_evicted"] for row in rows]
        assert all(row["num_jobs"] == 30 for row in rows)
    without, with_tier = evicted.values()
    assert all(one < 0.1 * other for one, other in zip(with_tier, without, strict=True))


def test_a_tier_needs_a_profile_with_the_time_of_loads() -> None:
    with pytest.raises(CommandError, match="demo-epyc-2-cores has no seconds_per_loaded_token"):
        main([*SMALL, "--tier-tokens", "100", "--profile", "demo-epyc-2-cores"])


def test_progress_ends_at_100_percent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-optimum"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("fcfs: 100 %, 6 programs")
    groups = ("job time", "time to first token", "waste", "hit rate", "fairness")
    assert [table.partition("  ")[0] for table in shown.out.split("\n\n")] == list(groups)


def test_there_is_a_plot_for_each_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--plot", str(tmp_path / "plots")]) == 0
    assert sorted(path.stem for path in (tmp_path / "plots").iterdir()) == [
        "fairness",
        "hit_rate",
        "job_time",
        "time_to_first_token",
        "waste",
    ]


@pytest.mark.parametrize("flag", ["--scale", "--rate"])
def test_infinite_loads_are_refused(flag: str) -> None:
    with pytest.raises(CommandError, match=f"argument {flag}: must be above 0, and finite"):
        main([*SMALL, flag, "inf"])


def test_a_cache_below_the_shared_tokens_is_refused() -> None:
    small = ["--workload", "swe", "--programs", "2", "--kv-tokens", "1000", "--no-optimum"]
    with pytest.raises(CommandError, match="stores only 1000: give it more blocks"):
        main(small)
