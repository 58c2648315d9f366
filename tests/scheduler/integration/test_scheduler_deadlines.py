"""A worker or pool that hangs on an intact connection counts as lost after a multiple of its usual
time. Answers that arrive later are ignored.
"""

import asyncio
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.process.watchdog.silence import ProcessTimes, Reading, ThreadTimes
from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer
from services.scheduler.adapters.pool import pool_client
from services.scheduler.adapters.pool.pool_client import PoolClient
from services.scheduler.adapters.workers import worker_client
from services.scheduler.adapters.workers.alarm import Alarm
from services.scheduler.core.ports import PoolLost
from tests.scheduler.engine_bench import eventually
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt
from tests.tiny_models import save_tiny_model
from tests.worker.worker_process import start as start_worker
from tests.worker.worker_process import until_serving as until_worker_serving

FLOOR_SECONDS = 0.8
CEILING_SECONDS = 60.0
MANY = 150


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes deadlines short, and reports the machine as not overloaded, so that deadlines apply."""
    monkeypatch.setattr(pool_client, "watch_addresses", lambda _: Reading)
    monkeypatch.setattr(worker_client, "STEP_FLOOR_SECONDS", FLOOR_SECONDS)
    monkeypatch.setattr(pool_client, "TRANSACTION_FLOOR_SECONDS", FLOOR_SECONDS)


async def test_a_step_that_takes_far_longer_than_usual_is_given_up_on(free_port: int) -> None:
    worker = FakeWorker(num_blocks=200)
    settings = {
        "step_timeout_seconds": CEILING_SECONDS,
        "metrics_address": f"127.0.0.1:{free_port}",
    }
    async with serving_replica(worker, **settings) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9), sampling=sampling(MANY))
        await gateway.until_tokens(1, 20)
        worker.going.clear()
        began = time.monotonic()
        await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
        stats = await replica.stats()
        assert time.monotonic() - began < CEILING_SECONDS / 2
        found = re.search(
            r"the worker at 127\.0\.0\.1:\d+ did not complete step \d+ within (\S+) s",
            stats.state_reason,
        )
        assert found is not None, stats.state_reason
        assert FLOOR_SECONDS <= float(found[1]) < CEILING_SECONDS / 2

        # A worker that hangs does not count as recovered, even if it answers other calls.
        generations = {step.generation for step in worker.steps}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * FLOOR_SECONDS):
                await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RUNNING)
        assert len({step.generation for step in worker.steps}) <= len(generations) + 1

        worker.going.set()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), MANY)
        await replica.until_idle()
        metrics = await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{free_port}/metrics")
        labels = 'stepwell_recoveries_total{engine="replica-0"'
        assert f'{labels},lost="workers",model_name="paged"}} 1.0' in metrics.text
        assert f'{labels},lost="pool",model_name="paged"}} 0.0' in metrics.text


async def test_the_first_step_of_a_size_may_take_its_time() -> None:
    worker = FakeWorker(num_blocks=200)
    async with (
        serving_replica(worker, step_timeout_seconds=CEILING_SECONDS) as replica,
        gateway_of(replica) as gateway,
    ):
        await gateway.add(1, prompt(9), sampling=sampling(20))
        await gateway.finish(1)
        worker.going.clear()
        await gateway.add(2, prompt(40, 500), sampling=sampling(20))
        asyncio.get_running_loop().call_later(3 * FLOOR_SECONDS, worker.going.set)
        await gateway.finish(2)
        assert (await replica.stats()).num_preemptions == 0


async def test_the_time_of_a_step_begins_when_the_one_before_it_is_done() -> None:
    worker = FakeWorker(num_blocks=200)
    async with (
        serving_replica(worker, step_timeout_seconds=CEILING_SECONDS) as replica,
        gateway_of(replica) as gateway,
    ):
        await gateway.add(1, prompt(9), sampling=sampling(MANY))
        await gateway.until_tokens(1, 20)
        allowed_seconds = worker.steps[-1].timeout_millis / 1000
        assert FLOOR_SECONDS <= allowed_seconds < CEILING_SECONDS / 2
        # Two steps are in flight. The delay of each is shorter than its deadline.
        for _ in range(2):
            num_steps = len(worker.steps)
            worker.going.clear()
            asyncio.get_running_loop().call_later(0.8 * allowed_seconds, worker.going.set)
            await replica.until(lambda _, before=num_steps: len(worker.steps) > before + 1)
        await gateway.finish(1)
        assert (await replica.stats()).num_preemptions == 0


class ProcessWorker:
    """A worker in a separate process that no supervisor watches."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        address = f"unix:{self._directory}/worker.sock"
        self.process = await start_worker(
            *("--model", str(self._directory), "--address", address, "--num-blocks", "64")
        )
        await until_worker_serving(address)
        return address

    async def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.communicate()


async def test_a_worker_that_was_stopped_and_goes_on_brings_nothing_stale(
    short_directory: Path,
) -> None:
    save_tiny_model(short_directory, "llama")
    worker = ProcessWorker(short_directory)
    async with (
        serving_replica(worker, step_timeout_seconds=CEILING_SECONDS) as replica,
        gateway_of(replica) as gateway,
    ):
        assert worker.process is not None
        request = {"sampling": sampling(MANY)}
        await gateway.add(1, range(20, 40), **request)
        await gateway.finish(1)
        await gateway.add(2, range(20, 40), **request)
        await gateway.until_tokens(2, 10)
        worker.process.send_signal(signal.SIGSTOP)
        await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
        worker.process.send_signal(signal.SIGCONT)
        await gateway.finish(2)
        assert len(gateway.heard[1].tokens) == MANY
        assert gateway.heard[2].tokens == gateway.heard[1].tokens
        await replica.until_idle()


async def test_a_worker_that_hangs_without_steps_is_noticed_before_the_next_request(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "IDLE_CHECK_SECONDS", 0.3)
    monkeypatch.setattr(worker_client, "PREPARING_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(worker_client, "DESCRIBE_TIMEOUT_SECONDS", 0.3)
    save_tiny_model(short_directory, "llama")
    worker = ProcessWorker(short_directory)
    async with (
        serving_replica(worker, step_timeout_seconds=CEILING_SECONDS) as replica,
        gateway_of(replica) as gateway,
    ):
        assert worker.process is not None
        await gateway.add(1, range(20, 40))
        await gateway.finish(1)
        await replica.until_idle()
        worker.process.send_signal(signal.SIGSTOP)
        await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
        assert (
            "was lost: it does not answer while it is idle" in (await replica.stats()).state_reason
        )
        worker.process.send_signal(signal.SIGCONT)
        await replica.until_idle()
        await gateway.add(2, range(20, 40))
        await gateway.finish(2)
        assert gateway.heard[2].tokens == gateway.heard[1].tokens


async def test_a_pool_that_hangs_without_transactions_is_noticed_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_client, "IDLE_CHECK_SECONDS", 0.3)
    async with serving_replica(cuttable=True) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, range(20, 40))
        await gateway.finish(1)
        await replica.until_idle()
        replica.pool_link.swallow_answers()
        async with asyncio.timeout(8):  # gRPC's pings would detect the lost connection later
            await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
        assert "the kvpool did not answer" in (await replica.stats()).state_reason
        replica.pool_link.cut()
        await replica.until_idle()
        await gateway.add(2, range(20, 40))
        await gateway.finish(2)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for the paths of sockets in it."""
    with tempfile.TemporaryDirectory(prefix="sw") as directory:
        yield Path(directory)


class HalfDeadPool(kvpool_pb2_grpc.KVPoolServicer):
    """A pool that ends each stream at once until the time `hangs_from` of the event loop. From then
    on it keeps streams open without answering.
    """

    def __init__(self, hangs_from: float) -> None:
        self._hangs_from = hangs_from
        self.num_streams = 0

    async def Transact(  # noqa: N802
        self,
        request_iterator: AsyncIterator[kvpool_pb2.TransactRequest],
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[kvpool_pb2.TransactResponse]:
        self.num_streams += 1
        if asyncio.get_running_loop().time() < self._hangs_from:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "half dead")
        async for _ in request_iterator:
            await asyncio.Event().wait()
        yield kvpool_pb2.TransactResponse()


async def test_the_time_of_a_transaction_ends_between_two_tries_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The deadline passes in the pause after the first try, because a second try would hang.
    monkeypatch.setattr(pool_client, "RETRY_SECONDS", 1.0)
    pool = HalfDeadPool(asyncio.get_running_loop().time() + 0.7)
    server = GrpcServer()
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, pool, "stepwell.kvpool.v1.KVPool")
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        client = PoolClient(channel, "pool", timeout_seconds=0.7)
        async with asyncio.timeout(60):
            with pytest.raises(PoolLost, match=r"did not answer a transaction within 0\.7 s"):
                await client.transact([])
        client.close()
        assert pool.num_streams == 1
    await server.drain(0)


async def test_an_alarm_that_comes_late_gives_what_waits_unread_a_second() -> None:
    rang = asyncio.Event()
    loop = asyncio.get_running_loop()
    alarm = Alarm(rang.set)
    alarm.set(0.05)
    time.sleep(0.4)  # noqa: ASYNC251 - this process stands still
    await asyncio.sleep(0.1)
    assert not rang.is_set()
    began = loop.time()
    async with asyncio.timeout(60):
        await rang.wait()
    assert loop.time() - began > 0.5


async def test_an_alarm_waits_for_work_that_gets_no_processor() -> None:
    """The watched thread gets a fifth of a processor, so its 0.2 s of work take a second."""
    loop = asyncio.get_running_loop()
    began, rang = loop.time(), asyncio.Event()

    def read(now: float) -> Reading:
        starved = ThreadTimes("R", 0.2 * (now - began), 0.0)
        return Reading(now, watched=[ProcessTimes({1: starved})])

    alarm = Alarm(rang.set, read)
    alarm.set(0.2)
    async with asyncio.timeout(60):
        await rang.wait()
    assert loop.time() - began > 0.99
    assert alarm.excused_seconds > 0.7


async def test_an_alarm_rings_at_the_time_that_was_set_last() -> None:
    rang: list[float] = []
    loop = asyncio.get_running_loop()
    alarm = Alarm(lambda: rang.append(loop.time()))
    alarm.set(0.05)
    alarm.set(0.3)
    later = loop.time() + 0.3
    await asyncio.sleep(0.15)
    assert not rang
    await eventually(lambda: bool(rang))
    assert rang[0] >= later
    alarm.set(30)
    alarm.set(0.01)
    await eventually(lambda: len(rang) > 1)
    alarm.set(0.01)
    alarm.stop()
    await asyncio.sleep(0.1)
    assert len(rang) == 2
