"""Simulated clients of a gateway over HTTP. In a session, a client sends the inputs of a
conversation (turns) one after the other.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from services.simulation.explore.answer import Answer
from services.simulation.explore.requests import Edge, Kind, Request

_PORT = 8000
_OK, _FIRST_SERVER_ERROR = 200, 500
_LOOK_SECONDS = 0.01
LOST = OSError, EOFError, ValueError
"""The errors of a client whose connection breaks."""
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


async def ask_http(gateway: str, request: Request, answer: Answer, name: str) -> None:
    """Sends a request with the id `name`, and adds what arrives to `answer`. Raises OSError,
    EOFError or ValueError if the reply is incomplete.
    """
    if request.kind is Kind.TURNS:
        await _ask_turns(gateway, request, answer)
    elif request.kind is Kind.WRONG:
        await _ask_wrongly(gateway, request, answer)
    else:
        await _post(gateway, request, *_body(request, name), answer)


async def _ask_turns(gateway: str, request: Request, answer: Answer) -> None:
    session = await _json(gateway, "POST", "/v1/sessions", {"model": request.model})
    path = f"/v1/sessions/{session['id']}"
    prompts = (request.prompt, *request.later_prompts)
    try:
        for number, prompt in enumerate(prompts):
            body = _completion(request, prompt) | {"session": session["id"]}
            is_last = number == len(prompts) - 1
            if is_last and request.breaks_after_seconds is not None:
                half = body | {"prompt": prompt[: len(prompt) // 2]}
                broken = _post(gateway, request, "/v1/completions", half, Answer())
                await _break_off(broken, request.breaks_after_seconds)
                if await _turns_after(gateway, path) != number:
                    answer.error = "the broken turn was complete"
                    return
            asking = _post(gateway, request, "/v1/completions", body, answer, number)
            if is_last and request.ends_in_turn:
                await _end_during(asking, gateway, path)
                return
            await asking
            if answer.error is not None:
                return
            await asyncio.sleep(request.pause_seconds)
    finally:
        try:
            await _delete(gateway, path)
        except asyncio.CancelledError:  # the client leaves at this moment
            await _delete(gateway, path)
            raise


async def _delete(gateway: str, path: str) -> None:
    with suppress(*LOST):
        await _json(gateway, "DELETE", path)


async def _end_during(asking: Any, gateway: str, path: str) -> None:
    """Ends a session as soon as its turn has begun, and receives the turn's complete answer."""
    turn = asyncio.ensure_future(asking)
    try:
        while (await _json(gateway, "GET", path))["status"] == "idle" and not turn.done():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        await _json(gateway, "DELETE", path)
        await turn
    finally:
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)


async def _break_off(asking: Any, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asking


async def _turns_after(gateway: str, path: str) -> Any:
    """Waits until no turn of a session runs. Returns the number of complete turns."""
    while True:
        session = await _json(gateway, "GET", path)
        if session["status"] != "in_turn":
            return session["num_turns"]
        await asyncio.sleep(_LOOK_SECONDS)


async def _ask_wrongly(gateway: str, request: Request, answer: Answer) -> None:
    """Sends a request that must be refused, and stores the status of the refusal as the answer."""
    body = _completion(request, request.prompt)
    fields = {"model": "unknown", "length": "x" * 9000, "temperature": -1.0}
    if request.wrong in fields:
        body["prompt" if request.wrong == "length" else request.wrong] = fields[request.wrong]
    encoded = json.dumps(body).encode()
    if request.wrong == "json":
        encoded = encoded[:-1]
    num_missing = len(encoded) // 2 if request.wrong == "cut" else 0
    reader, writer = await _send(gateway, "POST", "/v1/completions", encoded, num_missing)
    try:
        if num_missing:
            await asyncio.sleep(_LOOK_SECONDS)
            answer.add(0, "cut")
            return
        status, _ = await _read(reader)
        if status >= _FIRST_SERVER_ERROR:
            answer.error = str(status)
        else:
            answer.add(0, str(status))
    finally:
        writer.transport.abort()


async def _json(gateway: str, method: str, path: str, body: Any = None) -> Any:
    """Returns the reply to a short request. Raises ConnectionError if the reply is an error."""
    encoded = b"" if body is None else json.dumps(body).encode()
    reader, writer = await _send(gateway, method, path, encoded)
    try:
        status, reply = await _read(reader)
    finally:
        writer.transport.abort()
    if status != _OK:
        raise ConnectionError(f"{status}: {reply.decode()}")
    return json.loads(reply)


async def _post(
    gateway: str, request: Request, path: str, body: Any, answer: Answer, turn: int | None = None
) -> None:
    """Sends a body, and adds the reply to `answer`, under the number of its `turn` in a session."""
    encoded = json.dumps(body).encode() + b" " * request.num_spaces
    reader, writer = await _send(gateway, "POST", path, encoded, key=request.key)
    try:
        await _read_reply(reader, request.edge is Edge.STREAM, answer, turn)
    finally:
        writer.transport.abort()


async def _send(
    gateway: str, method: str, path: str, body: bytes, num_missing: int = 0, key: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request without the last `num_missing` bytes of its body."""
    reader, writer = await asyncio.open_connection(gateway, _PORT)
    head = f"{method} {path} HTTP/1.1\r\nHost: {gateway}\r\nConnection: close\r\n"
    head += f"Idempotency-Key: {key}\r\n" if key else ""
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[: len(body) - num_missing])
    return reader, writer


def _completion(request: Request, prompt: tuple[int, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": request.model, "prompt": prompt, "n": request.n}
    body |= {"stream": request.edge is Edge.STREAM} | request.sampling()
    if (program := request.program) is not None:
        body |= {"job_id": program.id, "is_last_step": program.ends}
        body |= {"this_func_call": program.tool} if program.tool else {}
        if program.keep_seconds and request.kind is Kind.CALL:
            body["prompt_cache_options"] = {"ttl": f"{program.keep_seconds}s"}
    if request.priority:
        body["priority"] = request.priority
    return body | {"ignore_eos": request.ignores_end, "stop": request.stop}


def _body(request: Request, name: str) -> tuple[str, dict[str, Any]]:
    if request.kind is Kind.VECTOR:
        return "/v1/embeddings", {"model": request.model, "input": [request.prompt]}
    body = _completion(request, request.prompt)
    if name and not request.key:
        body["request_id"] = name
    if request.more_prompts:
        body["prompt"] = [request.prompt, *request.more_prompts]
    if request.kind is Kind.CALL:
        message = {"role": "user", "content": " ".join(map(str, body.pop("prompt")))}
        asked = {"messages": [message], "tools": _TOOLS, "tool_choice": "required"}
        return "/v1/chat/completions", body | asked
    return "/v1/completions", body


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, pieces = await _begin_reading(reader)
    return status, b"".join([piece async for piece in pieces])


async def _read_reply(
    reader: asyncio.StreamReader, is_stream: bool, answer: Answer, turn: int | None
) -> None:
    status, pieces = await _begin_reading(reader)
    rest = b""
    async for piece in pieces:
        rest += piece
        if status == _OK and is_stream:
            *events, rest = rest.split(b"\n\n")
            for event in events:
                data = event.partition(b"data: ")[2]
                if data and data != b"[DONE]":
                    _take(json.loads(data), answer, turn)
    if status != _OK:
        answer.error = f"{status}: {rest.decode()}"
    elif not is_stream:
        _take(json.loads(rest), answer, turn)


async def _begin_reading(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    return int(head.split()[1]), _pieces(reader, int(length) if length else None)


async def _pieces(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """Yields the pieces of a body: `length` bytes at once, or chunks."""
    if length is not None:
        yield await reader.readexactly(length)
        return
    while size := int(await reader.readline() or b"x", 16):
        yield (await reader.readexactly(size + 2))[:-2]


def _take(body: Any, answer: Answer, turn: int | None) -> None:
    if "error" in body:
        answer.error = str(body["error"])
    for choice in body.get("choices", ()):
        index = choice["index"] if turn is None else turn
        answer.add(index, _text(choice))
        if choice.get("finish_reason"):
            answer.finished[index] = choice["finish_reason"]
    for vector in body.get("data", ()):
        answer.add_vector(vector["index"], vector["embedding"])


def _text(choice: Any) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice["delta"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = (f"{one.get('name') or ''}{one.get('arguments') or ''}" for one in functions)
    return (message.get("content") or "") + "".join(calls)
