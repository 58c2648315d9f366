"""What-if replays of a log with other settings: the results, the table and the plot."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2

from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.statistics import RunStatistics
from services.cli.replay.what_if import WhatIf, changed_config
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import WaitReason
from services.scheduler.core.policies import POLICIES
from tests.cli.recorded_logs import crowded, record
from tests.cli.replaying import replayed

PNG = b"\x89PNG\r\n\x1a\n"


def what_if(scenario: dict[str, Any], **changes: Any) -> tuple[RunStatistics, RunStatistics]:
    return with_config(scenario, lambda config: changed_config(config, changes))


def with_config(
    scenario: dict[str, Any], change: Callable[[SchedulerConfig], SchedulerConfig]
) -> tuple[RunStatistics, RunStatistics]:
    log = record(scenario)
    config_entry = log.entries[0]["config"]
    config = SchedulerConfig(**config_entry)

    async def run() -> tuple[RunStatistics, RunStatistics]:
        replaying = LogReplay(Header("none", config))
        for entry in log.entries[1:]:
            assert await replaying.replay_entry(Field(entry)) == []
        other = WhatIf(replaying.history, change(config))
        return replaying.statistics, await other.run()

    return asyncio.run(run())


def test_a_larger_pool_preempts_no_request() -> None:
    logged, other = what_if(crowded(), num_blocks=200)
    assert logged.num_preemptions > 2
    assert logged.num_recomputed_tokens > 10
    assert (other.num_preemptions, other.num_recomputed_tokens) == (0, 0)
    assert max(other.queued_steps) < max(logged.queued_steps)
    assert logged.wait_steps[WaitReason.NO_BLOCKS] > 10
    assert other.wait_steps[WaitReason.NO_BLOCKS] == 0
    assert other.num_generated_tokens >= logged.num_generated_tokens - 1


def test_a_smaller_pool_makes_requests_wait() -> None:
    logged, other = what_if(crowded(), num_blocks=10)
    assert sum(other.queued_steps) > sum(logged.queued_steps)
    assert len(other.samples) > len(logged.samples)


def test_a_smaller_max_num_seqs_makes_requests_wait() -> None:
    logged, other = what_if(crowded(), max_num_seqs=1)
    assert max(sample.num_running for sample in other.samples) == 1
    assert sum(other.first_token_steps) > sum(logged.first_token_steps)


def test_without_a_cache_there_are_no_hits() -> None:
    logged, other = what_if(crowded(), enable_prefix_caching=False)
    assert logged.hit_rate > 0.1
    assert other.hit_rate == 0


def test_a_request_of_higher_priority_is_queued_for_fewer_steps() -> None:
    scenario = crowded(policy="priority")
    scenario["events"][8]["add"]["priority"] = -1
    by_priority, by_arrival = what_if(scenario, policy="fcfs")

    def queued(run: RunStatistics) -> int | None:
        return next(a.queued_steps for r, a in run.accounts.items() if r.request_id == "r8")

    assert (queued(by_priority) or 0) < (queued(by_arrival) or 0)


def test_a_budget_of_drafts_that_are_taken_away_costs_steps() -> None:
    logged, other = what_if(crowded(num_speculative_tokens=3), num_speculative_tokens=0)
    assert sum(sample.num_draft_tokens for sample in logged.samples) > 20
    assert sum(sample.num_draft_tokens for sample in other.samples) == 0
    assert len(other.samples) > len(logged.samples)
    assert other.num_generated_tokens == logged.num_generated_tokens


def test_a_request_that_is_too_long_for_other_settings_is_refused() -> None:
    logged, other = what_if(crowded(), max_model_len=12)
    assert logged.num_refused == 0
    assert other.num_refused > 2
    assert other.num_refused + len(other.accounts) == len(logged.accounts)


def test_a_request_that_does_not_fit_twice_is_refused_if_two_groups_share_the_pool(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    twin = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=4, num_layers=1
    )
    path = record(crowded(num_gpu_blocks=60), twin).write(tmp_path / "steps.jsonl")
    status, out, _ = replayed(capsys, path, "--set", "num_blocks=6")
    assert status == 0
    table = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert int(table["requests"].split()[1]) < 10


def test_requests_that_can_never_be_admitted_are_an_error_of_one_sentence() -> None:
    with pytest.raises(CommandError, match="requests would wait for ever"):
        with_config(crowded(), lambda config: replace(config, num_blocks=3))


def test_the_table_shows_the_difference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = record(crowded()).write(tmp_path / "steps.jsonl")
    status, out, _ = replayed(capsys, path, "--set", "num_blocks=200", "--set", "policy=priority")
    assert status == 0
    table = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert table["requests"].split() == ["10", "10", "="]
    logged, what_if, change = table["preemptions"].split(maxsplit=2)
    assert (what_if, change) == ("0", f"-{logged} (-100 %)")
    assert set(table) >= {
        "queueing, steps, median",
        "queueing, steps, p99",
        "time to first token, steps, median",
        "time to first token, steps, p99",
        "waited for a step's tokens, steps",
        "waited for max_num_seqs, steps",
        "waited for blocks, steps",
        "recomputed tokens",
        "prefix hit rate",
        "steps",
        "tokens generated",
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("policy=lottery", f'policy must be one of {", ".join(POLICIES)}, not "lottery"'),
        ("block_size=0", "block_size must be a whole number from 1 to 1000000, not 0"),
        ("watermark=2", "watermark must be a number from 0 to 1, not 2"),
        ("async_scheduling=perhaps", 'async_scheduling must be true or false, not "perhaps"'),
        ("colour=blue", "there is no setting 'colour'; there are max_num_seqs"),
        ("policy", "say NAME=VALUE"),
        ("num_speculative_tokens=4", "cannot exceed the log's value"),
        ("enable_chunked_prefill=no", "must be true or false"),
        ("enable_chunked_prefill=false", "raise max_num_batched_tokens"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str, complaint: str
) -> None:
    path = record(crowded(2)).write(tmp_path / "steps.jsonl")
    status, _, err = replayed(capsys, path, "--set", change)
    assert status in (1, 2)
    assert complaint in err
    assert err.count("\n") == 1


def test_a_plot_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = record(crowded()).write(tmp_path / "steps.jsonl"), tmp_path / "out.png"
    status, out, _ = replayed(capsys, path, "--plot", picture)
    assert status == 0
    assert out.endswith(f"drawn to {picture}\n")
    content = picture.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 20_000


def test_a_plot_that_cannot_be_written_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = record(crowded()).write(tmp_path / "steps.jsonl")
    for name in ("missing/out.png", "out.hologram"):
        status, _, err = replayed(capsys, path, "--plot", tmp_path / name)
        assert status == 1
        assert err.startswith(f"stepwell replay: cannot write {tmp_path / name}: ")
        assert err.count("\n") == 1


def test_without_matplotlib_a_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    path = record(crowded(2)).write(tmp_path / "steps.jsonl")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')")
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "replay", path, "--plot", tmp_path / "out.png"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "stepwell replay: --plot needs matplotlib: pip install 'stepwell[plot]'\n"
