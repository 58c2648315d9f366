"""Clients of the services that use little processor time, since they share the processors with the
services that they measure.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.pool.block_hash import pack_token_ids
from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_EVENT, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


class GrpcClient:
    """Calls the gateway's `Inference.Generate`. All requests use one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, traceparent: str = ""
    ) -> AsyncIterator[int]:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=num_tokens),
            ignore_eos=True,
        )
        metadata = (("traceparent", traceparent),) if traceparent else ()
        async for response in self._stub.Generate(request, metadata=metadata):
            if response.token_ids:
                yield len(response.token_ids)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


class HttpClient:
    """Sends streamed `POST /v1/completions` to the gateway. Each concurrent request has its own
    connection.
    """

    def __init__(self, address: str, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`fields` are added to the body of each request."""
        self._host, _, port = address.rpartition(":")
        self._port, self._fields = int(port), fields
        self._idle: list[_Connection] = []

    async def open(self, num_connections: int) -> None:
        """Opens new connections before a load, so that connecting is not measured.

        The gateway closes connections that were idle for long.
        """
        await self.close()
        while len(self._idle) < num_connections:
            self._idle.append(await asyncio.open_connection(self._host, self._port))

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, traceparent: str = ""
    ) -> AsyncIterator[int]:
        reader, writer = self._idle.pop()
        headers = f"traceparent: {traceparent}\r\n" if traceparent else ""
        address = f"{self._host}:{self._port}"
        is_over = False
        try:
            writer.write(completion_request(address, prompt, num_tokens, headers, self._fields))
            await _expect_stream(reader)
            pending = b""
            while chunk := await read_chunk(reader):
                whole, _, pending = (pending + chunk).rpartition(_END)
                if count := _count_tokens(whole):
                    yield count
            is_over = True
        finally:
            if is_over:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def close(self) -> None:
        """Closes the connections."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            await writer.wait_closed()


def completion_request(
    address: str,
    prompt: Sequence[int],
    num_tokens: int,
    headers: str = "",
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """A streamed greedy `POST /v1/completions` for `num_tokens` tokens. `headers` are complete
    lines. `fields` are added to the body, or replace its fields.
    """
    body = json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def _expect_stream(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"the gateway answered {head.decode()}{(await reader.read(4096))!r}")


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Reads the next chunk of a chunked body. Empty at the end of the body."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


def _count_tokens(events: bytes) -> int:
    """The number of new tokens in complete server-sent events."""
    count = 0
    for event in events.split(_END):
        data = event.removeprefix(_EVENT)
        if data and data != _DONE:
            body = json.loads(data)
            if "error" in body:
                raise RuntimeError(f"the gateway answered {body['error']}")
            count += sum(len(choice["token_ids"]) for choice in body["choices"])
    return count


class SessionClient:
    """A client that opens a session with the scheduler, as a gateway does."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def deltas(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> AsyncIterator[scheduler_pb2.StepDeltas]:
        """Sends all prompts at once. Yields each message with tokens until all requests
        have ended.
        """
        call, numbers = self._stub.Session(), itertools.count(1)
        hello = scheduler_pb2.OpenSession(gateway_id="benchmark", release=own_release())
        await call.write(scheduler_pb2.SessionRequest(number=next(numbers), open=hello))
        await call.read()
        for handle, prompt in enumerate(prompts):
            add = scheduler_pb2.AddRequest(
                handle=handle,
                request_id=f"benchmark-{handle}",
                prompt_token_ids=pack_token_ids(prompt),
                sampling=common_pb2.SamplingParams(temperature=0, seed=0, max_tokens=num_tokens),
            )
            await call.write(scheduler_pb2.SessionRequest(number=next(numbers), add=add))
        num_open = len(prompts)
        while num_open:
            response = await call.read()
            if not isinstance(response, scheduler_pb2.SessionResponse):
                raise RuntimeError(f"the session ended: {await call.details()}")
            if response.deltas.rejected:
                raise RuntimeError(f"refused: {response.deltas.rejected[0].message}")
            num_open -= len(response.deltas.finished)
            if response.deltas.handles:
                yield response.deltas
        call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
