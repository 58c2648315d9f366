"""Clients of a gateway, over gRPC and over HTTP."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.rpc.channel import open_channel
from services.simulation.explore.requests import Edge, Kind, Request

HTTP_PORT, GRPC_PORT = 8000, 9000
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Rome"]},
                    "days": {"enum": [1, 2, 14]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass(slots=True)
class Answer:
    """The answer that a client has received so far. Choices are keyed by their indices, and turns
    of a session by their numbers.
    """

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Empty over HTTP."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Log-probabilities of the prompt and the answer, in their order."""
    finished: dict[int, str] = field(default_factory=dict)
    num_cached_tokens: int = 0
    """Not a part of the answer."""
    seconds: float = 0.0
    """The time until its end, without a session's pauses."""
    error: str | None = None

    def add(self, index: int, text: str, token_ids: Iterable[int] = ()) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        if token_ids:
            self.token_ids.setdefault(index, []).extend(token_ids)

    def add_vector(self, index: int, numbers: Iterable[float]) -> None:
        values = array("f", numbers)
        self.texts[index] = f"{len(values)} numbers, {crc32(values.tobytes()):08x}"
        self.finished[index] = "vector"

    def equals(self, whole: "Answer") -> bool:
        """Whether this is the whole answer. `whole` came over gRPC, this one perhaps over HTTP."""
        is_equal = (self.texts, self.finished, self.logprobs) == (
            whole.texts,
            whole.finished,
            whole.logprobs,
        )
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
            async with open_channel(f"{gateway}:{GRPC_PORT}") as channel:
                await _ask_grpc(gateway_pb2_grpc.InferenceStub(channel), request, answer)
        else:
            await _ask_http(gateway, request, answer)
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"


# gRPC.


async def _ask_grpc(stub: Any, request: Request, answer: Answer) -> None:
    if request.kind is Kind.VECTOR:
        prompt = gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=request.prompt))
        vectors = await stub.Embed(gateway_pb2.EmbedRequest(inputs=[prompt]))
        for index, vector in enumerate(vectors.vectors):
            answer.add_vector(index, vector.values)
    elif request.kind is Kind.TURNS:
        await _ask_turns(stub, request, answer)
    else:
        async for piece in stub.Generate(_message(request, request.prompt)):
            _take_piece(piece.index, piece, answer)


async def _ask_turns(stub: Any, request: Request, answer: Answer) -> None:
    call = stub.GenerateSession()
    try:
        for number, prompt in enumerate((request.prompt, *request.later_prompts)):
            turn = gateway_pb2.GenerateSessionRequest(turn=_message(request, prompt))
            await call.write(turn)
            while number not in answer.finished:
                response = await call.read()
                if response is grpc.aio.EOF:
                    raise EOFError("the session has ended")
                _take_piece(response.turn, response.piece, answer)
            await asyncio.sleep(request.pause_seconds)
        await call.done_writing()
        await call.read()
    except asyncio.InvalidStateError:  # the call has ended, and `read` raises its error
        await call.read()
        raise


def _message(request: Request, prompt: Iterable[int]) -> gateway_pb2.GenerateRequest:
    message = gateway_pb2.GenerateRequest(
        model=request.model,
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(**request.sampling()),
        n=request.n,
        stop=request.stop,
        cache_salt=request.salt,
    )
    if request.regex:
        forms = message.sampling.structured_outputs
        forms.kind, forms.text = common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, request.regex
    return message


def _take_piece(index: int, piece: gateway_pb2.GenerateResponse, answer: Answer) -> None:
    answer.add(index, piece.text, piece.token_ids)
    for rows in (piece.prompt_logprobs, piece.logprobs):
        if rows.logprobs:
            answer.logprobs.setdefault(index, []).extend(rows.logprobs)
    answer.num_cached_tokens += piece.usage.num_cached_tokens
    if piece.finish_reason:
        name = common_pb2.FinishReason.Name(piece.finish_reason)
        answer.finished[index] = name.removeprefix("FINISH_REASON_").lower()


# HTTP.


async def _ask_http(gateway: str, request: Request, answer: Answer) -> None:
    path, body = _body(request)
    encoded = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(gateway, HTTP_PORT)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {gateway}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
        writer.write(head.encode() + encoded)
        await _read_reply(reader, request.edge is Edge.STREAM, answer)
    finally:
        writer.transport.abort()


def _body(request: Request) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request."""
    body: dict[str, Any] = {"model": request.model}
    if request.kind is Kind.VECTOR:
        return "/v1/embeddings", body | {"input": [request.prompt]}
    body |= {"n": request.n, "stream": request.edge is Edge.STREAM} | request.sampling()
    if request.kind is Kind.CALL:
        message = {"role": "user", "content": " ".join(map(str, request.prompt))}
        asked = {"messages": [message], "tools": _TOOLS, "tool_choice": "required"}
        return "/v1/chat/completions", body | asked
    return "/v1/completions", body | {"prompt": request.prompt}


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
        answer.add(choice["index"], _text(choice))
        if choice.get("finish_reason"):
            answer.finished[choice["index"]] = choice["finish_reason"]
    for vector in body.get("data", ()):
        answer.add_vector(vector["index"], vector["embedding"])


def _text(choice: Any) -> str:
    """The text of a completion, or what a chat completion says and calls."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice["delta"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = (f"{one.get('name') or ''}{one.get('arguments') or ''}" for one in functions)
    return (message.get("content") or "") + "".join(calls)
