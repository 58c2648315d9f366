"""The gateway's limits on gRPC clients: on messages, on connections, and on waiting times."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import Aborted, OutOfRange
from services.gateway.adapters.grpc.inference_servicer import METHOD_PREFIX
from services.gateway.adapters.grpc.proto_meter import (
    MAX_FIELDS,
    MessageReaders,
    check_message,
)
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until

KEY = (("authorization", "Bearer right"),)


def raw_call(served: Serving, method: str) -> Any:
    return served.channel.stream_stream(METHOD_PREFIX + method)


async def status_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await call.code()


async def connect(served: Serving) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.grpc_address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def test_a_message_that_does_not_come_is_not_waited_for(model: Path):
    async with serving(model, receive_timeout_seconds=0.5) as served:
        calls = [raw_call(served, "Generate")() for _ in range(40)]
        assert await served.stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=60)
        assert {await status_of(call) for call in calls} == {grpc.StatusCode.ABORTED}


async def silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def prompt() -> AsyncIterator[bytes]:
    yield b"message"


async def test_a_read_that_is_ending_does_not_fail_the_next_one() -> None:
    readers = MessageReaders(0.1, pressed_seconds=0.0)
    slow = [asyncio.create_task(readers.read(silent())) for _ in range(16)]
    await asyncio.sleep(0)
    slow.append(asyncio.create_task(readers.read(silent())))
    for _ in range(2):  # then the time limits have passed, and no read has ended yet
        await asyncio.sleep(0)
    assert await readers.read(prompt()) == b"message"
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert {type(end) for end in ends} == {Aborted}


async def test_no_silent_call_holds_up_those_behind_it_for_long() -> None:
    readers = MessageReaders(DEADLINE_SECONDS, pressed_seconds=0.01)
    slow = [asyncio.create_task(readers.read(silent())) for _ in range(48)]
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_SECONDS / 2):
        assert await readers.read(prompt()) == b"message"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_long_message_is_refused(model: Path):
    async with serving(model, max_body_bytes=200_000) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Tokenize(gateway_pb2.TokenizeRequest(text="a" * 100_001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x12\x05ab", b"\x0a\x02\xff\xfe", b"\x07"])
async def test_what_is_no_message_is_an_invalid_argument(
    served: Serving, raw: bytes, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    for method in ("Generate", "Tokenize", "Detokenize"):
        call = raw_call(served, method)()
        await call.write(raw)
        await call.done_writing()
        assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        gateway_pb2.GenerateRequest(chat={"messages": [{}] * (MAX_FIELDS + 1)}),
        gateway_pb2.GenerateRequest(stop=[""] * (MAX_FIELDS + 1)),
        gateway_pb2.GenerateRequest(token_ids={"ids": [1] * 600_000}),
        gateway_pb2.DetokenizeRequest(token_ids=[1] * 600_000),
    ],
    ids=["messages", "stops", "prompt", "tokens"],
)
def test_a_message_that_would_take_long_to_parse_is_not_parsed(message: Message):
    with pytest.raises(OutOfRange):
        check_message(message.SerializeToString(), type(message), 100_000)


def test_long_texts_and_short_lists_are_parsed():
    message = gateway_pb2.GenerateRequest(text="a" * 1_000_000, stop=["b"] * 64)
    check_message(message.SerializeToString(), type(message), 1000)
    ids = gateway_pb2.GenerateRequest(token_ids={"ids": [2**31] * 90_000})
    check_message(ids.SerializeToString(), type(ids), 100_000)


async def test_silent_connections_are_ended(model: Path):
    async with serving(model, receive_timeout_seconds=0.2) as served:
        for reader, writer in [await connect(served) for _ in range(5)]:
            async with asyncio.timeout(10):
                await reader.read()
            writer.transport.abort()


async def test_there_are_no_more_connections_than_allowed(model: Path):
    # The receive timeout is long, so that no connection ends because it is silent.
    async with serving(model, max_connections=3, receive_timeout_seconds=600.0) as served:
        streams = [await connect(served) for _ in range(10)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in streams]
        await until(lambda: sum(task.done() for task in ended) >= 7)
        for task in ended:
            task.cancel()
        for _, writer in streams:
            writer.transport.abort()
        ready = served.stub.ListModels(gateway_pb2.ListModelsRequest(), wait_for_ready=True)
        assert await asyncio.wait_for(ready, DEADLINE_SECONDS)
