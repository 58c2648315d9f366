"""The benchmarks of the prefix directory run, with small sizes."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.directory.redis_faults import single_faults
from benchmarks.directory.request_faults import Times, compare_faults, requests_table
from services.common.redis.connection import RedisConnection
from tests.benchmarks.programs import run_program
from tests.redis_servers import needs_redis, redis_server
from tests.slowness import busy_slowness

pytestmark = needs_redis


@pytest.mark.slow
def test_quick_measures_both_layouts_and_the_index(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_program("directory", "--quick", "--json", file)
    figures = json.loads(file.read_text())
    log = figures["log"]
    # With more blocks, a block takes 12 bytes.
    assert log["log_bytes_per_block"] + log["snapshot_bytes_per_block"] <= 14
    assert figures["hashes"]["bytes_per_block"] > 100
    assert figures["index"]["num_keys"] == 39 * 512
    assert 0 < figures["index"]["lookup_median_millis"] < figures["hashes"]["lookup_median_millis"]
    assert figures["visibility"]["median_millis"] > 0
    assert "| index of a gateway | 19,968 blocks, 64 nodes |" in done.stdout


@pytest.mark.slow
def test_quick_breaks_redis_in_every_way() -> None:
    done = run_program("directory.faults", "--quick")
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 7
    most_seconds = 5 * busy_slowness()
    assert all(float(seconds) < most_seconds for _, _, seconds, _ in rows)


@pytest.mark.slow
def test_requests_do_not_fail_while_redis_is_stopped(servable_model: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        redis = RedisConnection(server.url)
        (stop,) = (fault for fault in single_faults(server, redis) if "SIGSTOP" in fault.name)
        (stopped,) = asyncio.run(
            compare_faults(servable_model, server.url, [stop], Times(1.5, 1.0), 1)
        )
    assert len(stopped.calm) == len(stopped.hit) == 20
    assert stopped.complaints == []
    assert max(stopped.exact_seconds) < 5 * busy_slowness()
    assert "| stopped (SIGSTOP), then continued | 40 | 0 | " in requests_table([stopped])
