"""The scheduler's client of the pool service, when no pool answers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer
from services.scheduler.adapters.pool.pool_client import RETRY_SECONDS, PoolClient
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import PoolLost
from tests.scheduler.cuttable_proxy import CuttableProxy
from tests.scheduler.serving_replica import Pool


@pytest.fixture
def silent_address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
async def client(silent_address: str) -> AsyncIterator[PoolClient]:
    async with open_channel(silent_address) as channel:
        client = PoolClient(channel, "pool", timeout_seconds=0.2)
        yield client
        client.close()


class HangingPool(kvpool_pb2_grpc.KVPoolServicer):
    def __init__(self) -> None:
        self.num_requests = 0

    async def Transact(  # noqa: N802
        self, requests: AsyncIterator[object], _: object
    ) -> AsyncIterator[kvpool_pb2.TransactResponse]:
        async for _request in requests:
            self.num_requests += 1
            await asyncio.Event().wait()
            yield kvpool_pb2.TransactResponse()


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[HangingPool, PoolClient]]:
    pool = HangingPool()  # type: ignore[abstract]
    server = GrpcServer()
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, pool, "stepwell.kvpool.v1.KVPool")
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        await channel.channel_ready()
        client = PoolClient(channel, "pool", timeout_seconds=0.2)
        yield pool, client
        client.close()
    await server.drain(0)


async def test_a_transaction_that_is_given_up_is_not_said_to_be_sent_again(
    hanging: tuple[HangingPool, PoolClient], caplog: pytest.LogCaptureFixture
) -> None:
    _, client = hanging
    async with asyncio.timeout(60):
        with pytest.raises(PoolLost, match=r"did not answer a transaction within 0\.2 s"):
            await client.transact(())
    assert "is sent again" not in caplog.text


async def test_what_waits_behind_a_transaction_that_fails_is_not_sent(
    hanging: tuple[HangingPool, PoolClient],
) -> None:
    pool, client = hanging
    transactions = [asyncio.create_task(client.transact(())) for _ in range(3)]
    async with asyncio.timeout(60):
        lost = await asyncio.gather(*transactions, return_exceptions=True)
    assert {str(one) for one in lost} == {"the kvpool did not answer a transaction within 0.2 s"}
    assert pool.num_requests == 1


async def test_a_transaction_ends_in_time_while_the_connection_begins(client: PoolClient) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(PoolLost, match=r"did not answer a transaction within 0\.2 s"):
            await client.transact(())


async def test_a_transaction_can_be_cancelled_while_the_connection_begins(
    client: PoolClient,
) -> None:
    transaction = asyncio.create_task(client.transact(()))
    await asyncio.sleep(0)
    transaction.cancel()
    _, pending = await asyncio.wait({transaction}, timeout=60)
    assert not pending
    assert transaction.cancelled()


async def test_a_transaction_ends_in_time_whose_stream_was_just_begun(closed_address: str) -> None:
    """The deadline passes just after the first retry has begun a stream. In some of the 30 cases
    this is before the stream's headers are sent.
    """
    async with asyncio.timeout(60):
        for tenth in range(30):
            async with open_channel(closed_address) as channel:
                seconds = RETRY_SECONDS + 0.0001 * tenth
                client = PoolClient(channel, "pool", timeout_seconds=seconds)
                with pytest.raises(PoolLost, match="did not answer a transaction within"):
                    await client.transact(())
                client.close()


async def test_a_cancelled_transaction_does_not_cancel_the_next() -> None:
    pool = Pool()
    link = CuttableProxy(await pool.start(), delay_seconds=0.02)
    async with open_channel(await link.start()) as channel:
        client = PoolClient(channel, "pool", timeout_seconds=60.0)
        await client.open(SchedulerConfig(4, 16, 32, block_size=4, num_blocks=10))
        cancelled = asyncio.create_task(client.transact(()))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        following = asyncio.create_task(client.transact(()))
        await asyncio.wait({cancelled, following}, timeout=60)
        assert following.done()
        assert not following.cancelled()
        assert isinstance(following.exception(), PoolLost | None)
        client.close()
    await link.close()
    await pool.stop()
