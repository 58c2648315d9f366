"""Clients that send one request and return its outcome, over either API of the gateway."""

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from benchmarks.common.clients import completion_request, read_chunk
from services.common.rpc.channel import open_channel
from services.common.rpc.status import from_rpc_error

DONE = "done"
REFUSED = "refused"
EVICTED = "evicted from the queue"
_EVICTION = "queue_timeout"
_LOAD = {_EVICTION, "queue_full", "queue_too_long", "too_many_concurrent_requests"}


class Sender(Protocol):
    """Sends requests over one API."""

    async def send(
        self, prompt: Sequence[int], num_tokens: int, deadline_seconds: float | None
    ) -> str:
        """Sends a request and reads its answer to the end. Returns DONE, REFUSED, EVICTED, or
        another error's code.
        """
        ...

    async def aclose(self) -> None:
        """Closes the sender's connections."""
        ...


class GrpcSender:
    """Calls `Inference.Generate` over one channel. Each request has a gRPC deadline."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)

    async def send(
        self, prompt: Sequence[int], num_tokens: int, deadline_seconds: float | None
    ) -> str:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=num_tokens),
            ignore_eos=True,
        )
        try:
            async for _ in self._stub.Generate(request, timeout=deadline_seconds):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return error.code().name.lower()
            return _refusal(from_rpc_error(error).error_reason.lower())
        return DONE

    async def aclose(self) -> None:
        await self._channel.close()


class HttpSender:
    """Sends streamed `POST /v1/completions` over kept-alive connections. Each request has its
    deadline in the header X-Request-Timeout.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(
        self, prompt: Sequence[int], num_tokens: int, deadline_seconds: float | None
    ) -> str:
        host, _, port = self._address.rpartition(":")
        headers = "" if deadline_seconds is None else f"X-Request-Timeout: {deadline_seconds}\r\n"
        request = completion_request(self._address, prompt, num_tokens, headers)
        connection = (
            self._idle.pop() if self._idle else await asyncio.open_connection(host, int(port))
        )
        reader, writer = connection
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = head.split(b" ", 2)[1]
        if status == b"200":
            result = await _stream_result(reader)
        else:
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            code = str(json.loads(await reader.readexactly(int(length)))["error"]["code"])
            result = _refusal(code) if status == b"503" and code in _LOAD else code
        self._idle.append(connection)
        return result

    async def aclose(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def _refusal(code: str) -> str:
    """EVICTED for the error of a request that waited in the queue for too long; else REFUSED."""
    return EVICTED if code == _EVICTION else REFUSED


async def _stream_result(reader: asyncio.StreamReader) -> str:
    result = DONE
    while chunk := await read_chunk(reader):
        if chunk.startswith(b'data: {"error"'):
            result = str(json.loads(chunk.partition(b"\n\n")[0][6:])["error"]["code"])
    return result
