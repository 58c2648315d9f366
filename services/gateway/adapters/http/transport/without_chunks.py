"""Sends answers over HTTP/1.0, which has no chunks. The end of a body of unknown length is the end
of the connection.
"""

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


async def answer_without_chunks(
    cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs the application. An answer without a Content-Length is sent without chunks."""
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length and not cycle.disconnected:
                _write_head(cycle, message)
                return
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)


def _write_head(cycle: RequestResponseCycle, message: Message) -> None:
    """Writes the answer's head as uvicorn does, but without the header Transfer-Encoding."""
    headers = (*cycle.default_headers, *message["headers"], (b"connection", b"close"))
    lines = [b"%b: %b\r\n" % header for header in headers]
    cycle.response_started = True
    cycle.chunked_encoding = False
    cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"\r\n"]))
