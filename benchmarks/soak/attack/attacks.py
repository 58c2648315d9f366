"""Attacks on the gateway over HTTP and gRPC, for `benchmarks.soak hostility` and for a short
version of it in the tests.

Each kind of attack is a function that makes one attack with random details and waits for its end
with a time limit. A server error other than 503 is a defect of the gateway. Any other answer is
accepted.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import grpc
from stepwell.common.v1.common_pb2 import SamplingParams, TokenIds
from stepwell.gateway.v1 import gateway_pb2

from benchmarks.soak.attack.bodies import BODIES, TEXT, costly
from services.common.rpc.channel import open_channel

ANSWER_SECONDS = 5.0
_OWN_ERROR = "Internal error from Core"
"""The error text of grpc's client if a call ends while its message is still being sent."""


@dataclass(slots=True)
class Target:
    """The gateway's addresses, its API key (empty if none is needed), and the defects found."""

    http: str
    grpc: str
    key: str = ""
    defects: list[str] = field(default_factory=list)

    def head(self, path: str, *headers: str) -> bytes:
        """The request line and the headers of a POST to `path`."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "".join(f"{line}\r\n" for line in (*lines, *headers, "")).encode()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()


Attack = Callable[[Target, Random], Awaitable[None]]


async def costly_body(target: Target, draw: Random) -> None:
    """Sends a body that is costly to serve."""
    name = draw.choice(sorted(BODIES))
    path, made = costly(name)
    body = await asyncio.to_thread(lambda: json.dumps(made).encode())
    await _exchange(target, target.head(path, f"Content-Length: {len(body)}") + body, name)


async def streamed_body(target: Target, draw: Random) -> None:
    """Sends a costly body, but reads little or nothing of the event stream with the answer."""
    path, made = costly(draw.choice(("256 short prompts", "logprobs", "stop strings")))
    body = json.dumps(made | {"stream": True}).encode()
    request = target.head(path, f"Content-Length: {len(body)}") + body
    with _connection() as opened:
        reader, writer = await opened(target)
        writer.write(request)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(draw.random()):
                await reader.read(draw.randrange(1, 10_000))


async def no_json(target: Target, draw: Random) -> None:
    """Sends a body that is not JSON, is deeply nested, or contains a very long value."""
    raw = draw.choice(
        (
            b"[" * 1_000_000,
            b'{"a":' * 300_000,
            b'{"prompt": "' + b"\\u00e9" * 600_000 + b'"}',
            b'{"seed": ' + b"9" * 3_000_000 + b"}",
            b" " * 4_000_000,
            draw.randbytes(100_000),
        )
    )
    await _exchange(target, target.head(TEXT, f"Content-Length: {len(raw)}") + raw, "no JSON")


async def odd_http(target: Target, draw: Random) -> None:
    """Sends bytes that are not an HTTP request, very many requests, or a too large request."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    if target.key:
        get += f"Authorization: Bearer {target.key}\r\n".encode()
    raw = draw.choice(
        (
            draw.randbytes(10_000),
            (get + b"\r\n") * 5_000,
            get + b"".join(b"X%d: a\r\n" % n for n in range(10_000)),
            get + b"X: " + b"a" * 5_000_000,
            b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
            target.head(TEXT, "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 100_000,
            target.head(TEXT, f"Content-Length: {10**12}") + b" " * 1_000_000,
        )
    )
    await _exchange(target, raw, "odd HTTP")


async def slow_http(target: Target, draw: Random) -> None:
    """Opens connections that send nothing, or only the beginning of a request."""
    with _connection() as opened:
        streams = [await opened(target) for _ in range(20)]
        for _, writer in streams:
            writer.write(draw.choice((b"", b"GET / HT", target.head(TEXT, "Content-Length: 9"))))
        await asyncio.sleep(draw.random())


async def wrong_key(target: Target, draw: Random) -> None:
    """Makes an attack of another kind with a wrong API key, or without a key."""
    kind = draw.choice((costly_body, streamed_body, no_json, odd_http, grpc_message))
    keys = ["", "x", target.key + "x", "k" * 60_000]
    if kind is not grpc_message:
        keys.append("é" * 1_000)  # gRPC's metadata is ASCII
    await kind(replace(target, key=draw.choice(keys)), draw)  # the copy shares the list of defects


async def grpc_message(target: Target, draw: Random) -> None:
    """Sends a gRPC message that is costly to parse or to serve."""
    method, raw = draw.choice(
        (
            ("Generate", b"\x22\xc0\x84\x3d" + b"\x0a\x00" * 500_000),
            ("Generate", b"\x3a\x00" * 900_000),
            ("Generate", gateway_pb2.GenerateRequest(text="a" * 1_900_000).SerializeToString()),
            (
                "Generate",
                gateway_pb2.GenerateRequest(
                    text="a",
                    n=64,
                    stop=["a" * 1_000] * 64,
                    sampling=SamplingParams(max_tokens=64, logprobs=20),
                ).SerializeToString(),
            ),
            (
                "Generate",
                gateway_pb2.GenerateRequest(
                    token_ids=TokenIds(ids=[5]),
                    sampling=SamplingParams(bad_words=[TokenIds(ids=[1] * 60)] * 2_000),
                ).SerializeToString(),
            ),
            ("Tokenize", gateway_pb2.TokenizeRequest(text=" " * 1_900_000).SerializeToString()),
            (
                "Detokenize",
                gateway_pb2.DetokenizeRequest(token_ids=[1] * 1_900_000).SerializeToString(),
            ),
            (
                "Detokenize",
                gateway_pb2.DetokenizeRequest(token_ids=[70] * 130_000).SerializeToString(),
            ),
            ("Detokenize", draw.randbytes(100_000)),
        )
    )
    await _call(target, method, [raw])


async def slow_grpc(target: Target, draw: Random) -> None:
    """Opens calls that send no message."""
    await asyncio.gather(
        *(_call(target, "Generate", None, seconds=draw.random()) for _ in range(20))
    )


ATTACKS: tuple[Attack, ...] = (
    costly_body,
    costly_body,
    costly_body,
    costly_body,
    streamed_body,
    no_json,
    odd_http,
    slow_http,
    grpc_message,
    grpc_message,
    slow_grpc,
)


async def attack(target: Target, draw: Random) -> None:
    """Makes one attack of a random kind. `wrong_key` is made only if the gateway needs a key."""
    attacks = (*ATTACKS, wrong_key) if target.key else ATTACKS
    await draw.choice(attacks)(target, draw)


@contextmanager
def _connection() -> Iterator[Callable[[Target], Awaitable[Any]]]:
    writers: list[asyncio.StreamWriter] = []

    async def opened(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = target.http.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    try:
        yield opened
    finally:
        for writer in writers:
            writer.transport.abort()


async def _exchange(target: Target, raw: bytes, what: str) -> None:
    with _connection() as opened, suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await opened(target)
            for start in range(0, len(raw), 2**18):
                writer.write(raw[start : start + 2**18])
                await writer.drain()
            status = (await reader.readline()).split(b" ")[1:2]
            while await reader.read(2**16):
                pass
            if status and status[0] in (b"500", b"502"):
                target.defects.append(f"{what}: {status[0].decode()}")


async def _call(
    target: Target, method: str, messages: list[bytes] | None, seconds: float = ANSWER_SECONDS
) -> None:
    async with open_channel(target.grpc) as channel:
        call: Any = channel.stream_stream(f"/stepwell.gateway.v1.Inference/{method}")(
            metadata=target.metadata(), timeout=seconds
        )
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages or ():
                await call.write(message)
            if messages is not None:
                await call.done_writing()
            async for _ in call:
                pass
        code, details = await call.code(), await call.details()
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and details != _OWN_ERROR:
            target.defects.append(f"{method}: {code}: {details}")
