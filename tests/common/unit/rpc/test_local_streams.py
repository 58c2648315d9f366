"""Streams over a Unix socket. Tests with the fixture `listening` also run over gRPC, because
clients and handlers must see the same behaviour.
"""

import asyncio
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.rpc.channel import open_channel
from services.common.rpc.local_call import LocalCall, for_each
from services.common.rpc.local_stream import FrameKind, LocalStream, streams_path
from services.common.rpc.message_limits import LOOKAHEAD_BYTES, MAX_MESSAGE_BYTES
from services.common.rpc.server import GrpcServer
from services.common.rpc.status import from_peer, from_rpc_error
from tests.common.streamed_pool import FEW, NAME, SECONDS, Pool, echoed, request, response, serving


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def test_each_message_is_answered_and_the_end_is_seen(listening: str) -> None:
    async with serving(echoed, listening) as (_, _, transact):
        call = transact()
        assert isinstance(call, LocalCall) is listening.startswith("unix:")
        for number in range(3):
            await call.write(request(number))
            assert await call.read() == response(number)
        await call.write(request(3))
        await call.done_writing()
        assert await call.read() == response(3)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(4))


async def test_each_message_is_taken_before_the_end_or_the_error(listening: str) -> None:
    async def answered(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        async for one in requests:
            for number in range(one.sequence):
                yield response(number)
        raise InvalidArgument("nothing more", field="operations")

    async with serving(answered, listening, lookahead=LOOKAHEAD_BYTES) as (_, _, transact):
        call, taken = transact(), list[int]()
        await call.write(request(3))
        await asyncio.sleep(0.05)  # several answers are received before the first is read
        await call.write(request(500))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await for_each(call, lambda one: taken.append(one.sequence))
        assert from_rpc_error(ended.value).field == "operations"
        assert taken == [*range(3), *range(500)]

        call = transact()
        await call.write(request(500))

        def refuse(one: Any) -> None:
            taken.append(-one.sequence)
            if one.sequence == 7:
                raise ValueError("seven")

        with pytest.raises(ValueError, match="seven"):
            await for_each(call, refuse)
        assert taken[-2:] == [-6, -7]
        call.cancel()

        call = transact()
        taking = asyncio.create_task(for_each(call, lambda _: None))
        await asyncio.sleep(0.05)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert call.cancelled()


async def test_an_error_comes_with_its_field_after_what_was_answered(listening: str) -> None:
    async def fails(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        yield response((await anext(requests)).sequence)
        raise InvalidArgument("operations is empty", field="operations", reason="EMPTY")

    async with serving(fails, listening) as (_, _, transact):
        call = transact()
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        await call.write(request(1))
        assert await call.read() == response(1)
        await ended.wait()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        error = from_rpc_error(failed.value)
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.field, error.error_reason) == (
            "operations is empty",
            "operations",
            "EMPTY",
        )
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "operations is empty"


async def test_a_cancelled_call_ends_both_sides(listening: str) -> None:
    async with serving(echoed, listening) as (_, pool, transact):
        call = transact()
        await call.write(request(1))
        await call.read()
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert call.cancelled()
        assert not call.cancel()
        await pool.ended.wait()


async def test_a_drain_ends_calls_after_its_time(listening: str) -> None:
    async with serving(echoed, listening) as (server, pool, transact):
        call = transact()
        await call.write(request(1))
        await call.read()
        draining = asyncio.create_task(server.drain(0.2))
        await asyncio.sleep(0.05)
        await call.write(request(2))
        assert await call.read() == response(2)
        await draining
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert pool.ended.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await transact().read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_further_calls_than_are_served_at_once_are_refused(listening: str) -> None:
    async with serving(echoed, listening, max_calls=1) as (_, _, transact):
        first = transact()
        await first.write(request(1))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await transact().read()
        assert isinstance(from_rpc_error(refused.value), ResourceExhausted)
        await first.write(request(2))
        assert await first.read() == response(2)


async def test_a_client_that_does_not_read_holds_up_the_server(listening: str) -> None:
    number = 5_000

    async def floods(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        await anext(requests)
        for index in range(number):
            yield response(index + 1)

    async with serving(floods, listening) as (_, pool, transact):
        call = transact()
        await call.write(request(1))
        before = -1
        while pool.num_answered > before:
            before = pool.num_answered
            await asyncio.sleep(0.2)
        assert 0 < before < number / 10
        assert [answer.sequence async for answer in call] == list(range(1, number + 1))


async def test_a_message_larger_than_any_buffer_comes_whole(listening: str) -> None:
    async def swapped(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        async for one in requests:
            yield kvpool_pb2.TransactResponse(sequence=len(one.pool_id), generation=one.sequence)

    async with serving(swapped, listening, lookahead=LOOKAHEAD_BYTES) as (_, _, transact):
        call = transact()
        for size in (3_000_000, 1, 300_000):
            await call.write(request(7, size))
            assert (await call.read()).sequence == size


async def test_a_status_is_read_though_the_server_is_written_to_after_it() -> None:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    call = LocalCall(mine, f"/{NAME}/Transact", None, None, FEW)
    status = status_pb2.Status(code=code_pb2.ABORTED, message="taken over").SerializeToString()
    theirs.sendall(struct.pack("!BI", FrameKind.STATUS, len(status)) + status)
    theirs.close()
    await call.write(b"unread")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.ABORTED, "taken over")


async def test_a_server_that_ends_without_a_status_is_unavailable() -> None:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    call = LocalCall(mine, f"/{NAME}/Transact", None, None, FEW)
    theirs.close()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert from_peer("the pool", ended.value).message == "the pool closed the connection"


async def test_without_a_socket_for_streams_they_go_over_grpc(directory: Path) -> None:
    server, address = GrpcServer(), f"unix:{directory}/pool.sock"
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, Pool(echoed), NAME)
    await server.start(address)
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(streams_path(f"{directory}/pool.sock"))
    left_over.close()
    async with open_channel(address) as channel, asyncio.timeout(SECONDS):
        call = kvpool_pb2_grpc.KVPoolStub(channel).Transact()
        assert not isinstance(call, LocalCall)
        await call.write(request(1))
        assert await call.read() == response(1)
    await server.drain(0)


async def test_other_calls_succeed_as_soon_as_streams_do(directory: Path) -> None:
    """Health checks fail while there is no server. They must succeed as soon as the server runs and
    a stream has succeeded.
    """
    address = f"unix:{directory / 'pool.sock'}"
    check = health_pb2.HealthCheckRequest()
    async with open_channel(address) as channel, asyncio.timeout(SECONDS):
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(check)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with serving(echoed, address):
            call = kvpool_pb2_grpc.KVPoolStub(channel).Transact()
            await call.write(request(1))
            assert await call.read() == response(1)
            assert await stub.Check(check)
            assert await anext(aiter(stub.Watch(check)))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("!BI", FrameKind.OPEN, 2) + b"ab",
        struct.pack("!BI", FrameKind.OPEN, 5) + struct.pack("!I", 1) + b"\xff",
        struct.pack("!BI", FrameKind.MESSAGE, MAX_MESSAGE_BYTES + 1),
        struct.pack("!BI", FrameKind.STATUS, 0),
    ],
    ids=["http", "no method", "no text", "too large", "not a client's"],
)
async def test_what_is_no_stream_ends_its_connection_alone(directory: Path, sent: bytes) -> None:
    async with serving(echoed, f"unix:{directory}/pool.sock") as (_, _, transact):
        path = streams_path(f"{directory}/pool.sock")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        call = transact()
        await call.write(request(1))
        assert await call.read() == response(1)


async def test_a_method_that_is_no_stream_is_refused_with_its_name(directory: Path) -> None:
    async with serving(echoed, f"unix:{directory}/pool.sock"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(streams_path(f"{directory}/pool.sock"))
        connection.setblocking(False)
        call = LocalCall(connection, f"/{NAME}/GetStats", None, None, FEW)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert f"/{NAME}/GetStats" in str(refused.value.details())


@given(st.lists(st.binary(max_size=2_000), max_size=20), st.lists(st.integers(1, 3_000)))
def test_messages_are_the_same_wherever_the_bytes_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    async def received() -> list[bytes]:
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setblocking(False)
        lost = asyncio.Event()
        stream = LocalStream(mine, LOOKAHEAD_BYTES, lambda *_: None, lost.set)
        sent = b"".join(
            struct.pack("!BI", FrameKind.MESSAGE, len(message)) + message for message in messages
        )
        loop, sizes = asyncio.get_running_loop(), iter(cuts)
        while sent:
            size = next(sizes, len(sent))
            await loop.sock_sendall(theirs, sent[:size])
            sent = sent[size:]
            await asyncio.sleep(0)
        theirs.close()
        found = []
        while (message := await stream.read()) is not None:
            found.append(message)
        await lost.wait()
        return found

    assert asyncio.run(received()) == messages


async def test_another_thread_sends_what_does_not_have_to_wait() -> None:
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        end.setblocking(False)
    sender, reader = (
        LocalStream(end, LOOKAHEAD_BYTES, lambda *_: None, lambda: None) for end in (mine, theirs)
    )
    large = bytes(3_000_000)
    sent: list[bool] = []

    def flood() -> int:
        """Sends messages until one is not sent at once. Returns how many were sent."""
        number = 0
        while sender.send_at_once(b"%d" % number):
            number += 1
        return number

    async with asyncio.timeout(SECONDS):
        thread = Thread(target=lambda: sent.extend(map(sender.send_at_once, (large, b""))))
        thread.start()
        thread.join()  # meanwhile the event loop cannot send the rest of the large message
        assert sent == [True, False]
        sender.send(FrameKind.MESSAGE, b"behind it")
        assert [await reader.read(), await reader.read()] == [large, b"behind it"]
        await sender.drained()
        number = await asyncio.to_thread(flood)
        sender.send(FrameKind.MESSAGE, b"last")
        assert [await reader.read() for _ in range(number)] == [
            b"%d" % one for one in range(number)
        ]
        assert await reader.read() == b"last"
        reader.close()
        assert not await asyncio.to_thread(sender.send_at_once, b"nobody reads it")
        sender.close()
        assert not await asyncio.to_thread(sender.send_at_once, b"nobody reads it")
