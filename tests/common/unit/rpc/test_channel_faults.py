"""Channels over links that are slow or broken, and to peers whose messages cannot be decoded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer
from tests.certificates import LOOPBACK, Authority, Files
from tests.scheduler.cuttable_proxy import CuttableProxy

SECONDS = 20.0
POOL = "stepwell.kvpool.v1.KVPool"
UNDECODABLE = b"\x0a\xff"


class WrongPool(kvpool_pb2_grpc.KVPoolServicer):
    """A pool that answers only MatchPrefix with bytes that can be decoded."""

    async def MatchPrefix(self, request: object, context: object) -> Any:  # noqa: ARG002, N802
        return kvpool_pb2.MatchPrefixResponse()

    async def GetStats(self, request: object, context: object) -> Any:  # noqa: ARG002, N802
        return None

    async def WatchEvents(self, request: object, context: object) -> Any:  # noqa: ARG002, N802
        yield None

    async def Transact(self, requests: Any, context: object) -> Any:  # noqa: ARG002, N802
        async for _ in requests:
            yield None


def with_wrong_bytes(servicer: Any, server: Any) -> None:
    """Registers a servicer. For a method that returns None, it answers undecodable bytes."""

    class Registered:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            del handlers

        def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
            def wrong(handler: Any) -> Any:
                def write(message: Any) -> bytes:
                    return UNDECODABLE if message is None else handler.response_serializer(message)

                return handler._replace(response_serializer=write)

            changed = {name: wrong(handler) for name, handler in handlers.items()}
            generic = grpc.method_handlers_generic_handler(service, changed)
            server.add_generic_rpc_handlers((generic,))
            server.add_registered_method_handlers(service, changed)

    kvpool_pb2_grpc.add_KVPoolServicer_to_server(servicer, Registered())


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0", tls: Any = None) -> AsyncIterator[str]:
    server = GrpcServer(tls=tls, has_local_streams=True)
    server.add(with_wrong_bytes, WrongPool(), POOL)
    try:
        yield await server.start(address)
    finally:
        await server.drain(0)


async def ask(channel: grpc.aio.Channel, seconds: float = SECONDS) -> None:
    stub = kvpool_pb2_grpc.KVPoolStub(channel)
    await stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest(), timeout=seconds)


@pytest.mark.parametrize(("has_tls", "delay_seconds"), [(True, 0.1), (False, 0.3)])
async def test_services_connect_over_a_link_of_some_latency(
    has_tls: bool, delay_seconds: float, tmp_path: Path
) -> None:
    authority = Authority("ca")
    files = Files(tmp_path).write(authority.issue(*LOOPBACK), authority)
    tls = files.tls() if has_tls else None
    async with serving(tls=tls) as target:
        proxy = CuttableProxy(target, delay_seconds)
        async with open_channel(await proxy.start(), tls) as channel:
            await asyncio.wait_for(channel.channel_ready(), SECONDS)
            await ask(channel)
        await proxy.close()


async def test_a_connection_is_replaced_after_two_calls_without_an_answer() -> None:
    """The proxy drops all data, so that neither side sees the connection end."""
    async with serving() as target:
        proxy = CuttableProxy(target)
        async with open_channel(await proxy.start()) as channel:
            await ask(channel)
            proxy.lose_all()
            for _ in range(2):
                assert proxy.num_connections == 1
                with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
                    await ask(channel, seconds=0.05)
            await ask(channel)
            assert proxy.num_connections == 2
        await proxy.close()


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_an_answer_that_cannot_be_decoded_ends_its_call_with_an_error(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = "127.0.0.1:0" if transport == "tcp" else f"unix:{tmp_path}/pool"
    async with serving(address) as target, open_channel(target) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)

        async def transact() -> None:
            call = stub.Transact()
            await call.write(kvpool_pb2.TransactRequest())
            await call.read()

        async def watch() -> None:
            async for _ in stub.WatchEvents(kvpool_pb2.WatchEventsRequest()):
                pass

        async def look() -> None:
            await stub.GetStats(kvpool_pb2.GetStatsRequest())

        for method, call in (("Transact", transact), ("WatchEvents", watch), ("GetStats", look)):
            with pytest.raises(grpc.aio.AioRpcError, match=f"{method} cannot be decoded") as failed:
                await call()
            assert failed.value.code() is grpc.StatusCode.INTERNAL
        await ask(channel)
    assert not caplog.records, "grpc logs a traceback"


async def test_a_call_that_ends_under_writes_has_the_status_of_the_server() -> None:
    class Refusing(kvpool_pb2_grpc.KVPoolServicer):
        async def Transact(self, requests: Any, context: Any) -> Any:  # noqa: N802
            await anext(aiter(requests))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the reason")
            yield

    async def write_on(call: Any) -> None:
        while True:
            await call.write(kvpool_pb2.TransactRequest())

    server = GrpcServer()
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, Refusing(), POOL)
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        for _ in range(50):
            call: Any = kvpool_pb2_grpc.KVPoolStub(channel).Transact()
            writer = asyncio.create_task(write_on(call))
            with pytest.raises(grpc.aio.AioRpcError, match="the reason"):
                await call.read()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await writer
    await server.drain(0)


async def test_a_channel_without_calls_that_is_renewed_tries_to_connect_no_more() -> None:
    """A channel that is not renewed tries to connect four times a second while it is open."""
    connected = asyncio.Event()

    async def close(_reader: object, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        channel = open_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest())
        for _ in range(2):
            connected.clear()
            await asyncio.wait_for(connected.wait(), SECONDS)
        channel.renew()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        connected.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connected.wait(), 0.6)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest())
        assert connected.is_set()
        await channel.close()
