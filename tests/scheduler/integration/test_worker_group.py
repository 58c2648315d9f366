"""A group of workers is open once every rank is connected and has answered an empty step. Messages
to the workers may be large, and workers may not read them.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from stepwell.common.v1 import common_pb2

from services.common.errors import Unavailable
from services.common.rpc import channel as rpc_channel
from services.common.rpc.channel import open_channel
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES, MAX_STEP_BYTES
from services.scheduler.adapters.pool.pool_client import PoolClient
from services.scheduler.adapters.replica import ReplicaClient
from services.scheduler.adapters.replica_config import scheduler_config
from services.scheduler.adapters.workers.worker_client import Rank, WorkerGroup
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.engine_bench import eventually
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import Pool

SECONDS = 60.0


async def test_a_rank_that_is_lost_while_another_one_has_not_answered_is_noticed() -> None:
    first, second = (FakeWorker(rank=rank, world_size=2) for rank in range(2))
    channels = {
        address: open_channel(address) for address in [await first.start(), await second.start()]
    }
    ranks = [Rank(address, channel) for address, channel in channels.items()]
    group = WorkerGroup(ranks, 60.0, common_pb2.Owner())
    second.going.clear()
    opening = asyncio.create_task(group.open(1))
    await eventually(lambda: ranks[0]._has_answered)
    await first.stop()
    await eventually(lambda: ranks[0]._call is None)
    second.going.set()
    with pytest.raises(WorkersLost, match="was lost"):
        await opening
    group.close()
    await second.stop()
    for channel in channels.values():
        await channel.close()


@pytest.fixture(params=["TCP", "Unix socket"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> FakeWorker:
    worker = FakeWorker()
    if request.param == "Unix socket":
        worker._address = f"unix:{tmp_path}/worker.sock"
    return worker


@asynccontextmanager
async def group_of(worker: FakeWorker, step_timeout_seconds: float) -> AsyncIterator[WorkerGroup]:
    address = await worker.start()
    async with open_channel(address, max_sent_bytes=MAX_STEP_BYTES) as channel:
        group = WorkerGroup([Rank(address, channel)], step_timeout_seconds, common_pb2.Owner())
        await group.open(1)
        yield group
        group.close()
    await worker.stop()


async def test_a_step_ends_in_time_while_the_worker_does_not_read_the_next(
    worker: FakeWorker,
) -> None:
    async with group_of(worker, 0.5) as group:
        worker.going.clear()
        first = await group.submit(SchedulerOutput(1))

        async def send_next() -> None:
            await group.submit(SchedulerOutput(2), "0" * 2**20)
            await first

        async with asyncio.timeout(SECONDS):
            with pytest.raises(WorkersLost, match=r"did not complete step 1 within 0\.5 s"):
                await send_next()


async def test_a_lost_rank_ends_the_write_to_a_rank_that_does_not_read() -> None:
    lost, hung = (FakeWorker(rank=rank, world_size=2) for rank in range(2))
    addresses = await lost.start(), await hung.start()
    async with open_channel(addresses[0]) as first, open_channel(addresses[1]) as second:
        ranks = [Rank(addresses[0], first), Rank(addresses[1], second)]
        group = WorkerGroup(ranks, SECONDS, common_pb2.Owner())
        await group.open(1)
        hung.going.clear()
        await group.submit(SchedulerOutput(1))
        sending = asyncio.create_task(group.submit(SchedulerOutput(2), "0" * 2**20))
        await eventually(lambda: any(step.step == 2 for step in lost.steps))
        await lost.stop()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(WorkersLost, match=f"{addresses[0]} was lost"):
                await sending
        group.close()
        await hung.stop()


async def test_opening_ends_while_the_connection_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(rpc_channel.CHANNEL_OPTIONS) | {"grpc.min_reconnect_backoff_ms": 500}
    monkeypatch.setattr(rpc_channel, "CHANNEL_OPTIONS", tuple(options.items()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(address) as to_silent, asyncio.timeout(SECONDS):
            group = WorkerGroup([Rank(address, to_silent)], 0.2, common_pb2.Owner())
            with pytest.raises(WorkersLost):
                await group.open(1)
            group.close()


async def test_a_step_may_be_larger_than_other_messages(worker: FakeWorker) -> None:
    async with group_of(worker, SECONDS) as group:
        output = await (await group.submit(SchedulerOutput(1), "0" * (MAX_MESSAGE_BYTES + 1)))
        assert output.token_ids == []


@asynccontextmanager
async def unopened_replica() -> AsyncIterator[tuple[FakeWorker, Rank, ReplicaClient]]:
    """A worker, and a replica's connections to it and to a pool, which are not open yet."""
    worker, pool = FakeWorker(), Pool()
    address, pool_address = await worker.start(), await pool.start()
    settings = SchedulerSettings(kvpool=pool_address, workers=(address,))
    async with open_channel(address) as channel, open_channel(pool_address) as pool_channel:
        rank = Rank(address, channel)
        group = WorkerGroup([rank], SECONDS, common_pb2.Owner())
        client = PoolClient(pool_channel, "pool", SECONDS)
        replica = ReplicaClient(client, group, partial(scheduler_config, settings))
        yield worker, rank, replica
        replica.close()
    await pool.stop()


async def test_a_loss_before_all_are_open_is_not_reported_afterwards() -> None:
    losses: list[PoolLost | WorkersLost] = []
    async with unopened_replica() as (worker, rank, replica):
        replica.watch(losses.append)
        num_attempts = 0

        async def prepare_workers() -> None:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts == 1:
                await worker.stop()
                await eventually(lambda: rank._call is None)
                await worker.start()
                raise Unavailable("the worker was lost")

        replica.prepare_workers = prepare_workers
        await replica.open()
        assert (num_attempts, losses) == (2, [])
        await worker.stop()
        await eventually(lambda: len(losses) == 1)


async def test_a_loss_between_opening_and_watching_is_reported() -> None:
    """At the start, the engine that watches is created after the opening."""
    losses: list[PoolLost | WorkersLost] = []
    async with unopened_replica() as (worker, rank, replica):
        await replica.open()
        await worker.stop()
        await eventually(lambda: rank._call is None)
        replica.watch(losses.append)
        assert [type(lost) for lost in losses] == [WorkersLost]
