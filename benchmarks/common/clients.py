"""Clients that use little processor time, because they share the processors with the services."""

import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from benchmarks.common.load import Arrived
from services.cli.bench.adapters.connection import Connections
from services.common.pool.block_hash import pack_token_ids
from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release

OK = 200
_END, _ERROR = b"\n\n", b'data: {"error"'
_TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([^\]]+)\]')
"""Matches an event's list of token ids. In the model's text, quotation marks are escaped."""


class GrpcClient:
    """Calls the gateway's `Inference.Generate`. All requests use one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, arrived: Arrived, traceparent: str = ""
    ) -> None:
        metadata = (("traceparent", traceparent),) if traceparent else ()
        call = self._stub.Generate(greedy_request(prompt, num_tokens), metadata=metadata)
        async for response in call:
            if response.token_ids:
                arrived(len(response.token_ids))

    async def close(self) -> None:
        await self._channel.close()


def greedy_request(prompt: Sequence[int], num_tokens: int) -> gateway_pb2.GenerateRequest:
    """A greedy request over gRPC for exactly `num_tokens` tokens."""
    return gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=num_tokens),
        ignore_eos=True,
    )


class HttpClient:
    """Sends streamed `POST /v1/completions`. Each concurrent request has its own connection."""

    def __init__(self, address: str, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`fields` are added to the body of each request."""
        self._address, self._fields = address, fields
        self._connections = connections_to(address)

    async def open(self, num_connections: int) -> None:
        """Opens connections before a load, so that connecting is not measured."""
        await self._connections.open(num_connections)

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, arrived: Arrived, traceparent: str = ""
    ) -> None:
        headers = f"traceparent: {traceparent}\r\n" if traceparent else ""
        request = completion_request(self._address, prompt, num_tokens, headers, self._fields)
        tokens = TokenStream(arrived)
        failure = await self._connections.exchange(request, tokens)
        if failure is not None or not tokens.is_done:
            raise RuntimeError(f"the gateway answered {tokens.status} {failure or tokens.error}")

    async def close(self) -> None:
        await self._connections.aclose()


class TokenStream:
    """A `Reply` that reads a streamed completion with token ids. It parses only errors as JSON.

    `arrived` is called with the number of tokens in each received piece of the answer.
    """

    def __init__(self, arrived: Arrived) -> None:
        self.status = 0
        self.error: dict[str, Any] = {}
        """The error of an answer with a status other than 200, or in an event. Empty if none."""
        self._arrived = arrived
        self._rest = b""

    @property
    def is_done(self) -> bool:
        """Whether the server answered with tokens and without an error."""
        return self.status == OK and not self.error

    def headers(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002 - `arrived` reads its own clock
        self._rest += data
        if self.status != OK:
            with suppress(ValueError):  # the body is not complete
                self.error = json.loads(self._rest)["error"]
            return
        events, _, self._rest = self._rest.rpartition(_END)
        if count := sum(ids.count(b",") + 1 for ids in _TOKEN_IDS.findall(events)):
            self._arrived(count)
        if _ERROR in events:
            event = events.partition(_ERROR)[2].partition(_END)[0]
            self.error = json.loads(b'{"error"' + event)["error"]


def connections_to(address: str) -> Connections:
    """Connections to a server at host:port."""
    host, _, port = address.rpartition(":")
    return Connections(host, int(port), time.monotonic)


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


class SessionClient:
    """A client that has a session (its stream) with the scheduler, as a gateway has."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def deltas(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> AsyncIterator[scheduler_pb2.StepDeltas]:
        """Sends all prompts at once. Yields the messages with tokens until all requests end."""
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
        await self._channel.close()
