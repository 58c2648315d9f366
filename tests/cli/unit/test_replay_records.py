"""The records of steps that `stepwell replay --jsonl` writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.scheduler.core.step_log.log_entry import Entry
from tests.cli.recorded_agents import Agents, crowded
from tests.cli.recorded_logs import crowded as crowded_scenario
from tests.cli.recorded_logs import record
from tests.cli.replaying import replayed

Record = dict[str, Any]


def names(text: str) -> list[str]:
    return text.split()


SNAPSHOT = names(
    "event step running waiting free_blocks total_blocks gpu_cached_blocks cpu_free_blocks "
    "cpu_total_blocks cpu_cached_blocks num_pinned pinned_blocks pinned_job_ids "
    "max_num_running_reqs max_num_scheduled_tokens"
)
ADMISSION = names(
    "event step req_id job_id local_hit_tokens external_hit_tokens total_prompt_tokens num_tokens "
    "connector_name load_kv_async"
)
DECISION = names(
    "event step scheduled_new_req_ids scheduled_resumed_req_ids scheduled_running_req_ids "
    "preempted_req_ids num_scheduled_tokens total_scheduled_tokens"
)
NAMES = {"step_snapshot": SNAPSHOT, "prefix_cache_event": ADMISSION, "step_decision": DECISION}


async def records_of(agents: Agents) -> list[Record]:
    found: list[Record] = []
    replay = LogReplay(Header("none", agents.config), found.append)
    for entry in agents.entries:
        assert await replay.replay_entry(Field(entry)) == []
    return json.loads(json.dumps(found))


def check_steps(records: list[Record], plans: Sequence[Entry]) -> None:
    """Asserts that each step has a snapshot, admissions and a decision that agree with its plan."""
    assert all(list(one) == NAMES[one["event"]] for one in records)
    decisions = [one for one in records if one["event"] == "step_decision"]
    begins = [number for number, one in enumerate(records) if one["event"] == "step_snapshot"]
    assert len(begins) == len(decisions) == len(plans)
    for begin, end, plan in zip(begins, [*begins[1:], len(records)], plans, strict=True):
        snapshot, *admissions, decision = records[begin:end]
        assert {one["step"] for one in records[begin:end]} == {plan["step"]}
        assert [len(plan["new"]), len(plan["resumed"])] == [
            len(decision["scheduled_new_req_ids"]),
            len(decision["scheduled_resumed_req_ids"]),
        ]
        assert len(admissions) == len(plan["block_tables"])
        assert list(decision["num_scheduled_tokens"].values()) == plan["num_scheduled_tokens"]
        assert decision["total_scheduled_tokens"] == sum(plan["num_scheduled_tokens"])
        assert len(decision["preempted_req_ids"]) == len(plan["preemptions"])
        assert 0 <= snapshot["pinned_blocks"] <= snapshot["free_blocks"] < snapshot["total_blocks"]


def test_a_log_becomes_records_of_its_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, path = record(crowded_scenario()), tmp_path / "records.jsonl"
    status, out, _ = replayed(capsys, log.write(tmp_path / "steps.jsonl"), "--jsonl", path)
    assert (status, out.splitlines()[-1]) == (0, f"records written to {path}")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    plans = [entry for entry in log.entries if entry.get("call") == "schedule"]
    check_steps(records, plans)
    first = records[0]
    assert (first["step"], first["running"], first["waiting"]) == (0, 0, 1)
    assert (first["free_blocks"], first["total_blocks"]) == (16, 17)
    assert (first["cpu_total_blocks"], first["num_pinned"]) == (0, 0)
    hits = [one for one in records if one["event"] == "prefix_cache_event"]
    assert sum(one["local_hit_tokens"] for one in hits) > 20
    assert {one["job_id"] for one in hits} == {None}
    decided = [one for one in records if one["event"] == "step_decision"]
    assert decided[0]["scheduled_new_req_ids"] == ["r0"]
    assert any(one["scheduled_running_req_ids"] for one in decided)
    assert any(one["preempted_req_ids"] for one in decided)


async def test_retained_contexts_are_the_pinned_ones_and_programs_are_jobs() -> None:
    agents = await crowded()
    records = await records_of(agents)
    check_steps(records, [entry for entry in agents.entries if entry["call"] == "schedule"])
    snapshots = [one for one in records if one["event"] == "step_snapshot"]
    assert max(one["num_pinned"] for one in snapshots) > 2
    assert max(one["pinned_blocks"] for one in snapshots) > 8
    assert max((one["pinned_job_ids"] for one in snapshots), key=len) > ["job0"]
    admitted = [one for one in records if one["event"] == "prefix_cache_event"]
    assert {one["job_id"] for one in admitted} == {None, *(f"job{number}" for number in range(5))}


async def test_requests_that_keep_their_blocks_after_their_end_are_pinned() -> None:
    records = await records_of(await crowded("continuum-fixed"))
    pins = [one for one in records if one["event"] == "step_snapshot" and one["num_pinned"]]
    assert len(pins) > 10
    assert all(one["pinned_blocks"] for one in pins)
    assert any(len(one["pinned_job_ids"]) > 1 for one in pins)
    assert all(one["pinned_blocks"] + one["free_blocks"] < one["total_blocks"] for one in pins)


def test_with_other_settings_the_records_are_of_the_other_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, path = record(crowded_scenario()).write(tmp_path / "steps.jsonl"), tmp_path / "records"
    status, _, _ = replayed(capsys, log, "--set", "num_blocks=200", "--jsonl", path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0
    assert {one["total_blocks"] for one in records if one["event"] == "step_snapshot"} == {200}
    assert not any(one.get("preempted_req_ids") for one in records)


def test_a_file_that_cannot_be_written_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = record(crowded_scenario()).write(tmp_path / "steps.jsonl")
    status, _, err = replayed(capsys, log, "--jsonl", tmp_path / "none" / "records.jsonl")
    assert (status, err.count("\n")) == (1, 1)
    assert "cannot write" in err


@pytest.mark.parametrize("name", ["steps.jsonl", "link.jsonl"])
def test_records_do_not_overwrite_the_log(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = record(crowded_scenario(2)).write(tmp_path / "steps.jsonl")
    (tmp_path / "link.jsonl").symlink_to(log)
    before = log.read_bytes()
    status, _, error = replayed(capsys, log, "--jsonl", tmp_path / name)
    assert status == 2
    assert error == "stepwell replay: --jsonl would overwrite the step log itself\n"
    assert log.read_bytes() == before
