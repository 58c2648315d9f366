"""A group of workers is open once every rank is connected and has answered an empty step."""

import asyncio

import pytest
from stepwell.common.v1 import common_pb2

from services.common.rpc.channel import open_channel
from services.scheduler.adapters.workers.worker_client import Rank, WorkerGroup
from services.scheduler.core.ports import WorkersLost
from tests.scheduler.engine_bench import eventually
from tests.scheduler.fake_worker import FakeWorker


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
