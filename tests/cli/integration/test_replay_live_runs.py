"""A replay of the step log of a live replica makes the same decisions as the replica."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.cli.errors import CommandError
from services.cli.replay.log_file import StepLogFile
from services.common.errors import InvalidArgument
from services.common.pool.block_hash import pack_token_ids
from services.scheduler.core.step_log.log_entry import TIMED_VERSION
from tests.cli.replaying import HANDLES, Disturbance, crowd, live_log, replay
from tests.scheduler.paged_model import next_token
from tests.scheduler.scheduler_process import running_scheduler
from tests.scheduler.serving_replica import SECONDS, Gateway, Replica, sampling
from tests.scheduler.story import prompt


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def calls(path: Path) -> set[str]:
    return {entry["call"] for entry in entries(path)[1:]}


async def give_up_on_some(_: Replica, gateway: Gateway) -> None:
    await gateway.until_tokens(0, 2)
    await gateway.abort(1, 5, 23)
    await gateway.until_tokens(4, 3)
    await gateway.abort(4, 22)


async def expect_no_difference(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert await asyncio.to_thread(replay, path) == 0
    said = capsys.readouterr().out
    assert said.endswith("\n0 differences\n")
    assert "ends early" not in said


@pytest.mark.parametrize("policy", ["fcfs", "priority", "program"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["two in flight", "one in flight"])
async def test_a_run_under_load_is_reproduced_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, async_scheduling: bool
) -> None:
    path = await live_log(
        tmp_path / "steps.jsonl", give_up_on_some, policy=policy, async_scheduling=async_scheduling
    )
    logged = entries(path)
    assert sum(len(entry.get("preemptions", ())) for entry in logged) > 5
    assert sum(entry.get("call") == "abort" for entry in logged) > 2
    await expect_no_difference(path, capsys)


async def go_on_with_some(_: Replica, gateway: Gateway) -> None:
    for handle in (0, 3, 6):
        await gateway.finish(handle)
        await gateway.say(end_turn=scheduler_pb2.EndTurn(handle=handle, tool="grep"))
        program = common_pb2.Program(id=f"job {handle}", tool="sed")
        shared, own = prompt(12, 0), prompt(3 + handle % 7, 400 + 20 * handle)
        context = [*shared, *own, *gateway.heard[handle].tokens]
        await gateway.add(50 + handle, [*context, 1, 2, 3], program=program)
    await gateway.finish(50, 53, 56)


async def test_a_run_of_programs_is_reproduced_with_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = await live_log(tmp_path / "steps.jsonl", go_on_with_some, policy="program")
    header, *logged = entries(path)
    assert header["version"] == TIMED_VERSION
    assert [one["tool"] for one in logged if one["call"] == "end_turn"] == ["grep"] * 3
    named = [one["program"]["id"] for one in logged if "program" in one]
    assert named == ["job 0", "job 3", "job 6"]
    assert all("now" in one for one in logged if one["call"] == "schedule")
    assert any("observed_steps" in one for one in logged)
    await expect_no_difference(path, capsys)


async def lose_the_pool(replica: Replica, gateway: Gateway) -> None:
    for tokens in (2, 8):
        await gateway.until_tokens(0, tokens)
        await replica.pool.stop()
        await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
        await replica.pool.start()


async def lose_the_worker(replica: Replica, gateway: Gateway) -> None:
    for tokens in (2, 8):
        await gateway.until_tokens(0, tokens)
        await replica.worker.stop()
        await replica.worker.start()


async def break_every_step_with_one_request(replica: Replica, gateway: Gateway) -> None:
    replica.worker.poison = 777
    await gateway.add(99, [*prompt(5), 777])
    await gateway.finish(99)
    finished = gateway.heard[99].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_STEP_FAILED


async def make_no_sense_of_some(replica: Replica, gateway: Gateway) -> None:
    await gateway.until_tokens(0, 2)
    replica.worker.nan_rows = frozenset({2})
    await gateway.until_tokens(0, 5)
    replica.worker.nan_rows = frozenset()


async def reset_and_pause(replica: Replica, gateway: Gateway) -> None:
    await gateway.until_tokens(0, 2)
    await replica.admin.ResetPrefixCache(
        scheduler_pb2.ResetPrefixCacheRequest(preempt_running=True)
    )
    await gateway.until_tokens(0, 6)
    await replica.admin.Pause(scheduler_pb2.PauseRequest(mode=scheduler_pb2.PAUSE_MODE_KEEP))
    with pytest.raises(grpc.aio.AioRpcError, match="requests still use blocks"):
        await replica.admin.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest())
    await gateway.abort(7, 8)
    await gateway.add(99, prompt(20), sampling=sampling(30))
    await replica.admin.Resume(scheduler_pb2.ResumeRequest())
    await gateway.until_tokens(0, 9)
    await replica.admin.Pause(scheduler_pb2.PauseRequest(mode=scheduler_pb2.PAUSE_MODE_ABORT))
    await gateway.finish(*HANDLES, 99)
    await replica.admin.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest())
    await gateway.add(100, prompt(20), sampling=sampling(5))
    await replica.admin.Resume(scheduler_pb2.ResumeRequest())
    await gateway.finish(100)


async def test_pausing_and_resetting_are_entries_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under load, the replica is paused and its prefix cache is reset. The log has both calls."""
    path = await live_log(tmp_path / "steps.jsonl", reset_and_pause, async_scheduling=True)
    logged = entries(path)[1:]
    operators = {"pause", "resume", "reset_prefix_cache", "preempt_all"}
    asked = [
        (entry["call"], entry.get("mode", entry.get("done")))
        for entry in logged
        if entry["call"] in operators
    ]
    assert asked == [
        ("preempt_all", None),
        ("reset_prefix_cache", True),
        ("pause", "keep"),
        ("reset_prefix_cache", False),
        ("resume", None),
        ("pause", "abort"),
        ("reset_prefix_cache", True),
        ("resume", None),
    ]
    calls_only = [entry["call"] for entry in logged]
    pauses = [number for number, call in enumerate(calls_only) if call == "pause"]
    resumes = [number for number, call in enumerate(calls_only) if call == "resume"]
    for pause, resume in zip(pauses, resumes, strict=True):
        assert "schedule" not in calls_only[pause:resume]
        assert "flush" in calls_only[pause:resume]
    assert calls_only[pauses[1] : resumes[1]].count("abort") > 5
    await expect_no_difference(path, capsys)


async def go_round_in_circles(_: Replica, gateway: Gateway) -> None:
    """Sends requests whose output repeats one token, until repetition detection ends them."""
    detection = common_pb2.RepetitionDetection(max_pattern_size=4, min_count=2)
    for handle in range(50, 56):
        token_ids = prompt(9, 7 * handle)
        same = next(token for token in range(1000) if next_token([*token_ids, token]) == token)
        await gateway.add(
            handle,
            token_ids,
            output_token_ids=pack_token_ids([same]),
            sampling=sampling(20, repetition_detection=detection),
        )
    await gateway.finish(*range(50, 56))
    for handle in range(50, 56):
        finished = gateway.heard[handle].finished
        assert finished is not None
        assert finished.reason == common_pb2.FINISH_REASON_REPETITION
        assert len(gateway.heard[handle].tokens) == 1


@pytest.mark.parametrize(
    ("disturb", "expected"),
    [
        (lose_the_pool, {"forget_pool"}),
        (lose_the_worker, {"forget_pool"}),
        (break_every_step_with_one_request, {"forget_pool", "admit_only", "abort"}),
        (make_no_sense_of_some, {"update_from_output"}),
        (go_round_in_circles, {"update_from_output"}),
    ],
)
async def test_a_run_with_losses_and_aborts_is_reproduced_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disturb: Disturbance, expected: set[str]
) -> None:
    path = await live_log(tmp_path / "steps.jsonl", disturb, pool_timeout_seconds=0.5)
    assert calls(path) >= expected
    await expect_no_difference(path, capsys)


async def test_a_compressed_log_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = await live_log(tmp_path / "steps.jsonl.zst", give_up_on_some)
    assert path.read_bytes().startswith(b"\x28\xb5\x2f\xfd")
    await expect_no_difference(path, capsys)


async def test_a_log_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("from before a crash")
    await live_log(path, give_up_on_some)
    assert path.read_text() == "from before a crash"
    second = tmp_path / "steps.2.jsonl"
    assert calls(second) >= {"add", "schedule", "update_from_output", "end"}
    assert stat.S_IMODE(second.stat().st_mode) == 0o600


async def test_what_is_logged_can_be_read_while_the_service_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"

    async def look(replica: Replica, gateway: Gateway) -> None:
        await gateway.finish(*HANDLES)
        await replica.until_idle()
        async with asyncio.timeout(SECONDS):
            while path.read_bytes().count(b'"call":"add"') < len(HANDLES):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(replay, path) == 0
        assert "the log ends early" in capsys.readouterr().out

    await live_log(path, look)


async def test_a_process_that_gets_sigterm_leaves_a_whole_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl.zst"
    settings = {"STEPWELL_SCHEDULER_STEP_LOG": str(path)}
    async with running_scheduler("--drain-seconds", "0.1", **settings) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await crowd(gateway, 60)
        await gateway.until_tokens(0, 5)
        running.scheduler.process.terminate()
        assert await running.scheduler.wait() == 0
        await gateway.until_ended()
    await expect_no_difference(path, capsys)


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.zst"])
async def test_a_process_that_is_killed_leaves_a_log_up_to_its_last_half_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    async with running_scheduler("--step-log", str(path)) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await crowd(gateway)
        await gateway.finish(*HANDLES)
        async with asyncio.timeout(SECONDS):
            while num_added(path) < len(HANDLES):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.scheduler.process.kill()
        await running.scheduler.wait()
        await gateway.until_ended()
    assert await asyncio.to_thread(replay, path) == 0
    assert "the log ends early" in capsys.readouterr().out


def num_added(path: Path) -> int:
    """The number of requests that the log contains so far."""
    try:
        return sum(line.entry.value["call"] == "add" for line in StepLogFile(path))
    except CommandError:
        return 0  # the log's header is not written yet


async def test_a_path_that_cannot_be_written_ends_the_service_with_one_sentence(
    tmp_path: Path,
) -> None:
    path = tmp_path / "missing" / "steps.jsonl"
    with pytest.raises(InvalidArgument, match=r"--step-log .*missing.*: No such file"):
        await live_log(path, give_up_on_some)
