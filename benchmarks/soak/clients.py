"""Requests of many kinds, as clients send them. They are the load of an endurance run.

Each kind is a function that sends one request and checks the answer. It raises AssertionError if
the answer is wrong.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from benchmarks.common.clients import greedy_request
from services.common.rpc.channel import open_channel

_SHARED_PREFIXES = 6
_MOST_PHRASES = 11
_TOKENS_PER_PHRASE = 120
"""A turn of a conversation has at most one phrase for each 120 tokens of `Endpoint.longest`. Even
if every letter of a phrase is a token, the three turns use only half of the longest sequence.
"""
_PHRASES = ("class Point:", "def read(path):", "import os", "return self.x", "for line in lines:")
_GOOD, _BAD = 200, 400


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The gateway's addresses and the model's limits. `longest` is the maximum number of tokens of
    a prompt and its answer together.
    """

    http: str
    grpc: str
    vocab_size: int
    longest: int

    def prompt(self, draw: Random, share: float | None = None) -> list[int]:
        """Token ids of a prompt. It often begins with a prefix that other prompts share, and the
        rest is random. `share` is the prompt's length as a fraction of `longest`. If `share` is
        None, a small fraction is selected at random.
        """
        if share is None:
            share = draw.choice((0.02, 0.1, 0.2, 0.3))
        length = max(int(share * self.longest), 2)
        family = Random(f"prefix/{draw.randrange(_SHARED_PREFIXES)}")
        common = draw.choice((0, length // 2, length - 1))
        return [
            (family if position < common else draw).randrange(3, self.vocab_size)
            for position in range(length)
        ]

    def num_tokens(self, draw: Random) -> int:
        return draw.choice((1, 8, 32, 64, max(self.longest // 4, 1)))


Ask = Callable[[Endpoint, Random], Awaitable[None]]


async def grpc_stream(endpoint: Endpoint, draw: Random) -> None:
    wanted = endpoint.num_tokens(draw)
    request = greedy_request(endpoint.prompt(draw), wanted)
    async with _calling(endpoint, request) as call:
        answers = [answer async for answer in call]
    _expect(sum(len(answer.token_ids) for answer in answers), wanted)


async def grpc_several(endpoint: Endpoint, draw: Random) -> None:
    """Sends a request for several sampled answers, with penalties and log-probabilities."""
    wanted, n = endpoint.num_tokens(draw), draw.randrange(2, 5)
    request = greedy_request(endpoint.prompt(draw), wanted)
    request.n = n
    request.sampling.MergeFrom(
        common_pb2.SamplingParams(
            temperature=0.8,
            top_p=0.9,
            top_k=50,
            seed=draw.randrange(2**32),
            presence_penalty=0.5,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logprobs=3,
            prompt_logprobs=draw.choice((None, 2)),
        )
    )
    async with _calling(endpoint, request) as call:
        answers = [answer async for answer in call]
    _expect({answer.index for answer in answers}, set(range(n)))
    _expect(sum(len(answer.token_ids) for answer in answers), n * wanted)


async def grpc_long(endpoint: Endpoint, draw: Random) -> None:
    """Sends a request with a long prompt, which is computed in chunks, and a short answer."""
    request = greedy_request(endpoint.prompt(draw, draw.uniform(0.4, 0.9)), 4)
    async with _calling(endpoint, request) as call:
        answers = [answer async for answer in call]
    _expect(sum(len(answer.token_ids) for answer in answers), 4)


async def grpc_hang_up(endpoint: Endpoint, draw: Random) -> None:
    """Cancels the call, or closes the connection, before the answer has ended."""
    request = greedy_request(endpoint.prompt(draw), endpoint.longest // 2)
    async with _calling(endpoint, request) as call:
        for _ in range(draw.randrange(3)):
            await call.read()
        if draw.random() < 0.5:
            call.cancel()


async def grpc_bad(endpoint: Endpoint, draw: Random) -> None:
    """Sends a request that the gateway must refuse, and checks the refusal."""
    request = greedy_request(endpoint.prompt(draw), 4)
    if draw.random() < 0.5:
        request.sampling.top_p = 2
    else:
        request.token_ids.ids.append(endpoint.vocab_size)
    async with _calling(endpoint, request) as call:
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            _expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
        else:
            _expect(await call.code(), grpc.StatusCode.INVALID_ARGUMENT)


async def http_stream(endpoint: Endpoint, draw: Random) -> None:
    body = {
        "prompt": endpoint.prompt(draw),
        "max_tokens": endpoint.num_tokens(draw),
        "stream": True,
        "ignore_eos": True,
        "logprobs": draw.choice((None, 2)),
        "logit_bias": draw.choice((None, {"5": -100})),
        "stream_options": {"include_usage": True},
    }
    status, answer = await _post(endpoint, "/v1/completions", body)
    _expect(status, _GOOD)
    _expect(answer.endswith(b"data: [DONE]\n\n"), True)
    usage = json.loads(answer.split(b"data: ")[-2])["usage"]
    _expect(usage["completion_tokens"], body["max_tokens"])


async def http_chat(endpoint: Endpoint, draw: Random) -> None:
    """Sends a conversation with stop strings and a penalty. The answer is not streamed."""
    most = min(_MOST_PHRASES, max(endpoint.longest // _TOKENS_PER_PHRASE, 1))
    turns = [" ".join(draw.choices(_PHRASES, k=draw.randint(1, most))) for _ in range(3)]
    body = {
        "messages": [
            {"role": role, "content": turn}
            for role, turn in zip(("user", "assistant", "user"), turns, strict=True)
        ],
        "max_tokens": endpoint.num_tokens(draw),
        "stop": ["self", "\n\n\n"],
        "repetition_penalty": 1.2,
        "n": draw.choice((1, 2)),
        "repetition_detection": {"max_pattern_size": 4, "min_count": 4},
    }
    status, answer = await _post(endpoint, "/v1/chat/completions", body)
    _expect(status, _GOOD)
    choices = json.loads(answer)["choices"]
    _expect(len(choices), body["n"])
    _expect(any("self" in choice["message"]["content"] for choice in choices), False)


async def http_hang_up(endpoint: Endpoint, draw: Random) -> None:
    """Closes the connection in the middle of a stream."""
    body = {"prompt": endpoint.prompt(draw), "max_tokens": endpoint.longest // 2, "stream": True}
    async with _sending(endpoint, "/v1/completions", json.dumps(body).encode()) as reader:
        await reader.read(draw.choice((1, 400, 2000)))


async def http_bad(endpoint: Endpoint, draw: Random) -> None:
    """Sends a request that the gateway must refuse, and checks the refusal."""
    body: Any = draw.choice(
        (
            {"prompt": [3, 4], "temperature": -1},
            {"prompt": [3, 4], "suffix": "blue"},
            {"prompt": [3] * (endpoint.longest + 10_000)},
            {"prompt": [endpoint.vocab_size]},
            "no object",
        )
    )
    status, _ = await _post(endpoint, "/v1/completions", body)
    _expect(status, _BAD)


KINDS: dict[str, tuple[int, Ask]] = {
    "gRPC, streamed": (6, grpc_stream),
    "gRPC, several sampled answers": (2, grpc_several),
    "gRPC, a long prompt": (2, grpc_long),
    "gRPC, hung up": (1, grpc_hang_up),
    "gRPC, refused": (1, grpc_bad),
    "HTTP, streamed": (6, http_stream),
    "HTTP, chat": (4, http_chat),
    "HTTP, hung up": (1, http_hang_up),
    "HTTP, refused": (1, http_bad),
}
"""Maps each kind to its weight in the random selection and to its function."""


@asynccontextmanager
async def _calling(endpoint: Endpoint, request: gateway_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """Sends a request on a new channel, as a separate client does. Yields the call."""
    channel = open_channel(endpoint.grpc)
    try:
        yield gateway_pb2_grpc.InferenceStub(channel).Generate(request)
    finally:
        await channel.close()


@asynccontextmanager
async def _sending(
    endpoint: Endpoint, path: str, body: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """Sends a request on a separate connection. Yields the reader of the answer."""
    host, _, port = endpoint.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {endpoint.http}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        yield reader
    finally:
        writer.close()


async def _post(endpoint: Endpoint, path: str, body: Any) -> tuple[int, bytes]:
    """Sends a request. Returns the status and the complete body of the answer."""
    async with _sending(endpoint, path, json.dumps(body).encode()) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    status = int(head.split(maxsplit=2)[1])
    return status, _joined(rest) if b"chunked" in head.lower() else rest


def _joined(chunked: bytes) -> bytes:
    pieces = []
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(chunked[:length])
        chunked = chunked[length + 2 :]
    return b"".join(pieces)


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} instead of {wanted!r}")
