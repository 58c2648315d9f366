"""The scheduler as a process: how it starts, drains and ends."""

import asyncio
import json
import signal
import time
from typing import Any

import pytest
from stepwell.worker.v1 import worker_pb2

from services.common.errors import StepwellError
from services.common.rpc.protocol import PROTOCOL, own_release
from tests.plain_http import http_get
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.scheduler_process import SchedulerProcess, running_scheduler
from tests.scheduler.serving_replica import SECONDS, Gateway, Pool, sampling
from tests.scheduler.story import prompt


async def test_sigterm_drains_what_runs_refuses_what_comes_and_exits_0() -> None:
    worker = FakeWorker()
    async with running_scheduler("--drain-seconds", "10", worker=worker) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await gateway.add(1, prompt(9), sampling=sampling(100))
        await gateway.until_tokens(1, 2)
        worker.going.clear()
        running.scheduler.process.send_signal(signal.SIGTERM)
        handle = await _refused_while_draining(gateway)
        worker.going.set()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), 100)
        rejected = gateway.heard[handle].rejected
        assert rejected is not None
        assert (rejected.code, rejected.reason) == (14, "DRAINING")
        await gateway.until_ended()
        assert gateway.error is None
        assert await running.scheduler.wait() == 0


async def _refused_while_draining(gateway: Gateway) -> int:
    """Sends requests until one is refused because the scheduler drains. Returns its handle."""
    for handle in range(2, 1000):
        await gateway.add(handle, prompt(5), sampling=sampling(1))
        await gateway.abort(handle)
        await asyncio.sleep(0.01)
        if gateway.heard[handle].rejected is not None:
            return handle
    raise AssertionError("never drains")


async def test_an_idle_gateway_does_not_hold_up_the_end() -> None:
    async with running_scheduler("--drain-seconds", "15") as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        began = time.monotonic()
        running.scheduler.process.terminate()
        assert await running.scheduler.wait() == 0
        assert time.monotonic() - began < 10
        await gateway.until_ended()


async def test_what_does_not_end_within_the_drain_is_cut_off() -> None:
    worker = FakeWorker()
    async with running_scheduler("--drain-seconds", "0.2", worker=worker) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await gateway.add(1, prompt(9), sampling=sampling(100))
        await gateway.until_tokens(1, 1)
        worker.going.clear()
        running.scheduler.process.terminate()
        assert await running.scheduler.wait() == 0
        await gateway.until_ended()
        assert isinstance(gateway.error, StepwellError)


async def test_a_drain_without_workers_ends_the_sessions_at_once() -> None:
    """If a whole replica stops, its workers end, and gateways continue its requests elsewhere."""
    worker = FakeWorker()
    async with running_scheduler("--drain-seconds", "60", worker=worker) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await gateway.add(1, prompt(9), sampling=sampling(100))
        await gateway.until_tokens(1, 1)
        worker.going.clear()
        running.scheduler.process.terminate()
        await gateway.until(lambda: gateway.state is not None and gateway.state.draining)
        began = time.monotonic()
        await worker.stop()
        await gateway.until_ended()
        assert time.monotonic() - began < 20
        assert await running.scheduler.wait() == 0


async def test_it_can_be_stopped_while_it_waits_for_pool_and_workers(free_port: int) -> None:
    scheduler = await SchedulerProcess.start(
        *("--kvpool", f"127.0.0.1:{free_port}", "--workers", f"127.0.0.1:{free_port}"),
        *("--address", "127.0.0.1:0", "--log-format", "json"),
    )
    try:
        assert scheduler.process.stderr is not None
        line = json.loads(await scheduler.process.stderr.readline())
        assert line["service"] == "scheduler"
        assert "waiting for the kvpool and the workers" in line["message"]
        scheduler.process.terminate()
        assert await scheduler.wait() == 0
    finally:
        await scheduler.close()


async def test_metrics_are_served_while_the_worker_starts(free_port: int) -> None:
    """Otherwise a long start would look as if the scheduler had ended."""
    worker, pool = FakeWorker(), Pool()
    worker.protocol = 9
    scheduler = await SchedulerProcess.start(
        *("--kvpool", await pool.start(), "--workers", await worker.start()),
        *("--address", "127.0.0.1:0", "--log-format", "json", "--replica", "r"),
        *("--metrics-address", f"127.0.0.1:{free_port}"),
    )

    def states() -> dict[str, str]:
        text = http_get(f"http://127.0.0.1:{free_port}/metrics").text
        assert "stepwell_build_info{" in text
        lines = (line for line in text.splitlines() if line.startswith("stepwell_engine_state{"))
        return dict(line.removeprefix("stepwell_engine_state").rsplit(" ", 1) for line in lines)

    async def until_logged(text: str) -> None:
        assert scheduler.process.stderr is not None
        while text not in (await scheduler.process.stderr.readline()).decode():
            pass

    try:
        async with asyncio.timeout(SECONDS):
            await until_logged("this worker has version 9.0")
            starting = await asyncio.to_thread(states)
            worker.protocol = PROTOCOL
            await until_logged("serving on")
            served = await asyncio.to_thread(states)
        assert starting == {'{engine="r",state="starting"}': "1.0"}
        assert served['{engine="r",model_name="paged",state="idle"}'] == "1.0"
        assert not any("starting" in labels for labels in served)
    finally:
        await scheduler.close()
        await worker.stop()
        await pool.stop()


async def test_it_waits_for_a_worker_of_its_own_protocol_and_says_so_once() -> None:
    worker, pool = FakeWorker(), Pool()
    worker.protocol = 9
    scheduler = await SchedulerProcess.start(
        *("--kvpool", await pool.start(), "--workers", await worker.start()),
        *("--address", "127.0.0.1:0", "--log-format", "json"),
    )
    try:
        assert scheduler.process.stderr is not None
        lines = [json.loads(await scheduler.process.stderr.readline())["message"]]
        await asyncio.sleep(1)  # the scheduler retries, but does not log the reason again
        worker.protocol = PROTOCOL
        while "serving on" not in lines[-1]:
            lines.append(json.loads(await scheduler.process.stderr.readline())["message"])
        assert lines[0] == (
            "waiting for the kvpool and the workers: this worker has version 9.0 (protocol 9), "
            f"the scheduler version {own_release().version} (protocol {PROTOCOL})"
        )
        assert sum("waiting" in line for line in lines) == 1
    finally:
        await scheduler.close()
        await worker.stop()
        await pool.stop()


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"fingerprint": b"g" * 32}, "another model"),
        ({"pipeline_parallel_size": 2}, "another number of pipeline stages"),
    ],
)
async def test_a_worker_that_comes_back_otherwise_ends_it_with_a_sentence(
    changed: dict[str, Any], what: str
) -> None:
    worker = FakeWorker()
    async with running_scheduler(worker=worker) as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        await gateway.add(1, prompt(9), sampling=sampling(150))
        await gateway.until_tokens(1, 1)
        await worker.stop()
        worker.description.MergeFrom(worker_pb2.DescribeResponse(**changed))
        await worker.start()
        assert await running.scheduler.wait() == 1
        assert running.scheduler.errors[-1] == (
            f"stepwell scheduler: the worker has restarted with {what}: restart the scheduler"
        )
        await gateway.until_ended()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--workers", "a:1"], "--kvpool (or STEPWELL_SCHEDULER_KVPOOL) must be given"),
        (["--kvpool", "a:1", "--workers", ""], "--workers must name at least one, not nothing"),
        (
            ["--kvpool", "a:1", "--workers", "a:2", "--watermark", "nan"],
            "--watermark must be from 0 to 1, not nan",
        ),
    ],
    ids=["missing", "empty", "out of range"],
)
async def test_a_bad_setting_ends_it_with_a_sentence(flags: list[str], sentence: str) -> None:
    scheduler = await SchedulerProcess.start(*flags)
    assert await scheduler.wait() == 2
    assert scheduler.errors[-1].startswith(f"stepwell scheduler: {sentence}")
    assert len(scheduler.errors) == 1


async def test_an_address_of_another_machine_ends_it_with_a_sentence() -> None:
    worker, pool = FakeWorker(), Pool()
    scheduler = await SchedulerProcess.start(
        *("--kvpool", await pool.start(), "--workers", await worker.start()),
        *("--address", "192.0.2.1:1"),
    )
    try:
        assert await scheduler.wait() == 1
        assert scheduler.errors[-1].startswith("stepwell scheduler: cannot listen on 192.0.2.1:1")
    finally:
        await scheduler.close()
        await worker.stop()
        await pool.stop()
