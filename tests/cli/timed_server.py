"""A server of the OpenAI API that answers with known delays, and records when it answered.

The name of the requested model determines the server's behaviour, by words such as
`ttft=60 itl=15 refuse=ignore_eos`:

* ttft, itl: milliseconds before the first token, and between tokens;
* refuse: requests with this field are refused with status 400;
* status: every completion has this HTTP status;
* break: the connection is closed after this number of tokens;
* error: an error is sent after this number of tokens;
* usage=no: no usage is reported;
* role-first: an event without output is sent at once;
* pack: the number of tokens in one write;
* silent: the answer finishes without a token;
* tokenize=no: there is no /tokenize.

`python -m tests.cli.timed_server` prints its port and serves until standard input ends. GET /log
returns the body of each completion, the time of its arrival, and the time at which each token was
written. The times are readings of the machine's monotonic clock.
"""

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any

LOG: list[dict[str, Any]] = []


def words_of(model: str) -> dict[str, str]:
    """Maps each word of a model's name to the text after its "=", which may be empty."""
    return {name: value for name, _, value in (word.partition("=") for word in model.split())}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            now = time.perf_counter()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            await answer(head.split(" ")[1], json.loads(body or "{}"), fields, writer, now)
    writer.close()


async def answer(
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    writer: asyncio.StreamWriter,
    now: float,
) -> None:
    words = words_of(body.get("model", ""))
    if path == "/log":
        send_json(writer, 200, LOG)
    elif path == "/health":
        send_json(writer, 200, {})
    elif path == "/v1/models":
        send_json(writer, 200, {"data": [{"id": "ttft=1 itl=1"}]})
    elif path == "/tokenize" and "tokenize" not in words:
        send_json(writer, 200, {"tokens": body["prompt"].split(), "count": -1})
    elif path == "/tokenize":
        send_json(writer, 404, {"error": {"message": "no such path"}})
    elif "status" in words:
        send_json(writer, int(words["status"]), {"error": {"message": "as you wish"}})
    elif words.get("refuse", "-") in body:
        send_json(writer, 400, {"error": {"message": f"unknown field {words['refuse']}"}})
    else:
        note = {"body": body, "headers": headers, "came": now, "wrote": []}
        LOG.append(note)
        await complete(path, body, words, writer, note["wrote"])
    await writer.drain()


async def complete(
    path: str,
    body: dict[str, Any],
    words: dict[str, str],
    writer: asyncio.StreamWriter,
    wrote: list[float],
) -> None:
    is_chat = path.endswith("chat/completions")
    num_tokens = 0 if "silent" in words else body["max_tokens"]
    text = json.dumps(body.get("messages")) if is_chat else body["prompt"]
    usage = {
        "prompt_tokens": len(text.split()),
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    if not body.get("stream"):
        await asyncio.sleep(float(words.get("ttft", 0)) / 1000)
        wrote.append(time.perf_counter())
        choice = {"text": "x", "message": {"content": "x"}, "finish_reason": "length"}
        send_json(writer, 200, {"choices": [choice], "usage": usage})
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
    if "role-first" in words:
        send_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    pack = int(words.get("pack", 1))
    for index in range(num_tokens):
        delay = words.get("itl", 0) if index else words.get("ttft", 0)
        if index % pack == 0:
            await asyncio.sleep(float(delay) / 1000)
        if index == int(words.get("break", -1)):
            writer.close()
            return
        if index == int(words.get("error", -1)):
            send_event(writer, {"error": {"message": "the worker is away"}})
            break
        reason = "length" if index == num_tokens - 1 else None
        part = {"delta": {"content": f" w{index}"}} if is_chat else {"text": f" w{index}"}
        wrote.append(time.perf_counter())
        send_event(writer, {"choices": [{**part, "finish_reason": reason}], "usage": None})
    if words.get("usage") != "no" and (body.get("stream_options") or {}).get("include_usage"):
        send_event(writer, {"choices": [], "usage": usage})
    send_chunk(writer, b"data: [DONE]\n\n")
    send_chunk(writer, b"")


def send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    send_chunk(writer, f"data: {json.dumps(event)}\n\n".encode())


def send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def send_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
