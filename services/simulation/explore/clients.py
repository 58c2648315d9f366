"""Clients of a gateway, over gRPC and over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.rpc.channel import open_channel
from services.simulation.explore.requests import Edge, Request

HTTP_PORT, GRPC_PORT = 8000, 9000


@dataclass(slots=True)
class Answer:
    """The answer that a client has received so far. Choices are keyed by their indices."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Empty over HTTP."""
    finished: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    def add(self, index: int, text: str, token_ids: Iterable[int] = ()) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        if token_ids:
            self.token_ids.setdefault(index, []).extend(token_ids)

    def equals(self, whole: "Answer") -> bool:
        """Whether this is the whole answer. `whole` came over gRPC, this one perhaps over HTTP."""
        is_equal = self.texts == whole.texts and self.finished == whole.finished
        return is_equal and self.error is None and self.token_ids in ({}, whole.token_ids)

    def begins(self, whole: "Answer") -> bool:
        """Whether this is the beginning of an answer."""
        return all(
            whole.texts.get(index, "").startswith(text) for index, text in self.texts.items()
        ) and all(
            whole.token_ids.get(index, [])[: len(ids)] == ids
            for index, ids in self.token_ids.items()
        )


async def ask(gateway: str, request: Request, answer: Answer) -> None:
    """Sends a request, and adds to `answer` what arrives."""
    try:
        if request.edge is Edge.GRPC:
            await _ask_grpc(gateway, request, answer)
        else:
            await _ask_http(gateway, request, answer)
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"


async def _ask_grpc(gateway: str, request: Request, answer: Answer) -> None:
    message = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=request.prompt),
        sampling=common_pb2.SamplingParams(**request.sampling()),
        n=request.n,
        stop=request.stop,
    )
    if request.regex:
        forms = message.sampling.structured_outputs
        forms.kind, forms.text = common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, request.regex
    async with open_channel(f"{gateway}:{GRPC_PORT}") as channel:
        async for piece in gateway_pb2_grpc.InferenceStub(channel).Generate(message):
            answer.add(piece.index, piece.text, piece.token_ids)
            if piece.finish_reason:
                name = common_pb2.FinishReason.Name(piece.finish_reason)
                answer.finished[piece.index] = name.removeprefix("FINISH_REASON_").lower()


async def _ask_http(gateway: str, request: Request, answer: Answer) -> None:
    is_stream = request.edge is Edge.STREAM
    body = {"model": "demo", "prompt": request.prompt, "n": request.n, "stream": is_stream}
    encoded = json.dumps(body | request.sampling()).encode()
    reader, writer = await asyncio.open_connection(gateway, HTTP_PORT)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {gateway}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
        writer.write(head.encode() + encoded)
        await _read_reply(reader, is_stream, answer)
    finally:
        writer.transport.abort()


async def _read_reply(reader: asyncio.StreamReader, is_stream: bool, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split()[1])
    pieces = b""
    if "transfer-encoding: chunked" in head:
        async for piece in _chunks(reader):
            pieces += piece
            if status == 200 and is_stream:
                *events, pieces = pieces.split(b"\n\n")
                for event in events:
                    _take_event(event, answer)
    else:
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        pieces = await reader.readexactly(length)
    if status != 200:
        answer.error = f"{status}: {pieces.decode()}"
    elif not is_stream:
        _take(json.loads(pieces), answer)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline() or b"x", 16):
        yield (await reader.readexactly(size + 2))[:-2]


def _take_event(event: bytes, answer: Answer) -> None:
    data = event.partition(b"data: ")[2]
    if data and data != b"[DONE]":
        _take(json.loads(data), answer)


def _take(body: Any, answer: Answer) -> None:
    if "error" in body:
        answer.error = str(body["error"])
    for choice in body.get("choices", ()):
        answer.add(choice["index"], choice["text"])
        if choice.get("finish_reason"):
            answer.finished[choice["index"]] = choice["finish_reason"]
