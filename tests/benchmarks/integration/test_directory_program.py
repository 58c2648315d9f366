"""The benchmark of the directory runs: all of it, small."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.programs import run_program
from tests.redis_servers import needs_redis

pytestmark = needs_redis


@pytest.mark.slow
def test_quick_measures_both_layouts_and_the_index(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_program("directory", "--quick", "--json", file)
    figures = json.loads(file.read_text())
    log = figures["log"]
    assert log["log_bytes_per_block"] + log["snapshot_bytes_per_block"] <= 14  # 12 of more blocks
    assert figures["hashes"]["bytes_per_block"] > 100
    assert figures["index"]["num_keys"] == 39 * 512
    assert 0 < figures["index"]["lookup_median_millis"] < figures["hashes"]["lookup_median_millis"]
    assert figures["visibility"]["median_millis"] > 0
    assert "| index of a gateway | 19,968 blocks, 64 nodes |" in done.stdout


@pytest.mark.slow
def test_quick_breaks_redis_in_every_way() -> None:
    done = run_program("directory.faults", "--quick")
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 6
    assert all(float(seconds) < 5 for _, _, seconds, _ in rows)
