"""Streams over a Unix socket when code is defective, peers are hostile or resources are exhausted.
Tests with the fixture `listening` also run over gRPC, because clients must see the same behaviour.
"""

import asyncio
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.errors import Unavailable
from services.common.rpc.addresses import unix_path
from services.common.rpc.local_call import LocalCall
from services.common.rpc.local_server import LocalServer
from services.common.rpc.local_stream import FrameKind, LocalStream, streams_path
from services.common.rpc.message_limits import LOOKAHEAD_BYTES, MAX_MESSAGE_BYTES
from services.common.rpc.server import GrpcServer
from tests.common.streamed_pool import FEW, NAME, echoed, request, response, serving

TRANSACT = f"/{NAME}/Transact"


@pytest.fixture
def at_socket(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix:{tmp_path_factory.mktemp('s')}/pool.sock"


def connected(address: str) -> socket.socket:
    """Opens a connection to the server's socket for streams."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(streams_path(unix_path(address)))
    connection.setblocking(False)
    return connection


def call_over(connection: socket.socket) -> LocalCall:
    return LocalCall(
        connection,
        TRANSACT,
        kvpool_pb2.TransactRequest.SerializeToString,
        kvpool_pb2.TransactResponse.FromString,
        FEW,
    )


@contextmanager
def without_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)


async def test_without_descriptors_the_server_waits_and_then_accepts(
    at_socket: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(echoed, at_socket):
        connection = socket.socket(socket.AF_UNIX)
        with without_descriptors():
            connection.connect(streams_path(unix_path(at_socket)))
            began = time.process_time()
            await asyncio.sleep(0.4)
            assert time.process_time() - began < 0.1
        assert len([one for one in caplog.messages if "the service accepts no stream" in one]) == 1
        connection.setblocking(False)
        call = call_over(connection)
        await call.write(request(1))
        assert await call.read() == response(1)
        call.cancel()


async def test_a_call_without_descriptors_is_unavailable(listening: str) -> None:
    async with serving(echoed, listening) as (_, _, transact):
        with without_descriptors():
            call = transact()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        while True:
            call = transact()
            try:
                await call.write(request(1))
                assert await call.read() == response(1)
            except grpc.aio.AioRpcError:  # the channel waits before it connects again
                await asyncio.sleep(0.1)
            else:
                break
        call.cancel()


async def test_a_cancelled_read_cancels_its_call(listening: str) -> None:
    """Otherwise the next request would read the answer to the cancelled one."""
    async with serving(echoed, listening) as (_, pool, transact):
        call = transact()
        await call.write(request(1))
        assert await call.read() == response(1)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert call.cancelled()
        await pool.ended.wait()


async def test_a_cancelled_write_cancels_its_call(listening: str) -> None:
    async def never_reads(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        async for one in requests:
            yield response(one.sequence)

    async with serving(never_reads, listening) as (_, _, transact):
        call = transact()

        async def write_on() -> None:
            while True:
                await call.write(request(1, 100_000))

        writing = asyncio.create_task(write_on())
        await asyncio.sleep(0.3)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert call.cancelled()


async def test_a_handler_that_only_writes_is_ended_with_its_client(listening: str) -> None:
    async def floods(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        await anext(requests)
        for number in range(10**6):
            yield response(number)

    async with serving(floods, listening) as (_, pool, transact):
        call = transact()
        await call.write(request(1))
        await call.read()
        call.cancel()
        await pool.ended.wait()
        assert pool.num_answered < 100_000


async def test_a_request_that_is_too_large_ends_its_call_with_that_reason(at_socket: str) -> None:
    async with serving(echoed, at_socket) as (_, _, transact):
        call = transact()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.write(request(1, MAX_MESSAGE_BYTES))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_response_that_is_too_large_ends_its_call_with_that_reason(at_socket: str) -> None:
    async def answers_at_length(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        await anext(requests)
        answer = response(1)
        answer.MergeFromString(b"\xfa\x3f" + b"\x80\x80\x80\x20" + bytes(MAX_MESSAGE_BYTES))
        yield answer

    async with serving(answers_at_length, at_socket) as (_, _, transact):
        call = transact()
        await call.write(request(1))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "status", [b"\xff\xff\xff", status_pb2.Status(code=99).SerializeToString()], ids=["text", "99"]
)
async def test_a_status_that_is_none_ends_the_call_as_unknown(status: bytes) -> None:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    call = LocalCall(mine, TRANSACT, None, None, FEW)
    theirs.sendall(struct.pack("!BI", FrameKind.STATUS, len(status)) + status)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(call.read(), 5)
    assert ended.value.code() is grpc.StatusCode.UNKNOWN
    theirs.close()


async def test_what_is_no_frame_ends_the_connection_where_its_header_ends() -> None:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    lost = asyncio.Event()
    LocalStream(mine, LOOKAHEAD_BYTES, lambda *_: None, lost.set)
    for byte in struct.pack("!BI", FrameKind.MESSAGE, MAX_MESSAGE_BYTES + 1):
        assert not lost.is_set()
        theirs.send(bytes([byte]))
        await asyncio.sleep(0.01)
    await asyncio.wait_for(lost.wait(), 5)
    theirs.close()


async def test_empty_messages_that_are_not_read_are_bounded() -> None:
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        end.setblocking(False)
    stream = LocalStream(mine, LOOKAHEAD_BYTES, lambda *_: None, lambda: None)
    empty = struct.pack("!BI", FrameKind.MESSAGE, 0)
    messages, num_sent, has_stalled = memoryview(empty * 1_000_000), 0, False
    while num_sent < len(messages):
        try:
            num_sent += theirs.send(messages[num_sent : num_sent + 50_000])
            has_stalled = False
        except BlockingIOError:
            if has_stalled:
                break
            has_stalled = True
            await asyncio.sleep(0.1)
    assert num_sent < len(messages)
    theirs.close()
    number = 0
    while await stream.read() is not None:
        number += 1
    assert number == num_sent // len(empty)


async def test_a_connection_that_names_no_method_is_ended(tmp_path: Path) -> None:
    server, address = LocalServer(opening_seconds=0.1), f"unix:{tmp_path}/pool.sock"
    server.start(streams_path(unix_path(address)))
    connection = connected(address)
    async with asyncio.timeout(5):
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    assert not server.unopened
    connection.close()
    await server.stop(0)


async def test_a_call_whose_client_has_gone_is_not_begun(at_socket: str) -> None:
    """The server begins only the third call. The clients of the others have cancelled them."""
    begun = []

    async def noted(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        begun.append(await anext(requests))
        yield response(1)

    async with serving(noted, at_socket) as (_, _, transact):
        for number in (1, 2):
            abandoned = transact()
            await abandoned.write(request(number))
            abandoned.cancel()
        call = transact()
        await call.write(request(3))
        assert await call.read() == response(1)
    assert begun == [request(3)]


async def test_a_server_that_stops_serves_no_connection_that_it_has_accepted(
    at_socket: str,
) -> None:
    async with serving(echoed, at_socket) as (server, pool, transact):
        running = transact()
        await running.write(request(1))
        await running.read()
        connection = connected(at_socket)
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(server.drain(5))
        await asyncio.sleep(0.05)
        call = call_over(connection)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(call.read(), 2)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the server stops"
        running.cancel()
        await draining
        assert pool.num_answered == 1


async def test_a_call_that_is_ended_before_it_begins_has_a_status(at_socket: str) -> None:
    server = LocalServer()

    async def served(_: object, __: object) -> None:
        raise AssertionError

    server.handlers[TRANSACT] = grpc.stream_stream_rpc_method_handler(served)
    server.start(streams_path(unix_path(at_socket)))
    call = call_over(connected(at_socket))
    for _ in range(100):
        await asyncio.sleep(0)
        if server.tasks:
            break
    for task in server.tasks:
        assert task.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(call.read(), 5)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_a_file_in_the_place_of_the_socket_is_kept(at_socket: str) -> None:
    path = Path(streams_path(unix_path(at_socket)))
    path.write_text("kept")

    async def start() -> None:
        server = GrpcServer(has_local_streams=True)
        with pytest.raises(Unavailable, match="cannot listen on unix:"):
            await server.start(at_socket)
        await server.drain(0)

    asyncio.run(start())
    assert path.read_text() == "kept"
