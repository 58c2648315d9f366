"""Writes the parts of an answer's body as they are produced."""

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class BodyWriter:
    """Writes the parts of a chunked body to the connection, after the answer's status and headers
    were sent. It is faster than uvicorn's `send`, which needs a message and a coroutine for each
    part, and a part may be a single token.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def can_write(self) -> bool:
        """Whether `write` may be called. If it is false, because the write buffer is full, `drain`
        must be awaited first. It is true if the client has disconnected.
        """
        return not self._flow.write_paused or self._cycle.disconnected

    def write(self, part: bytes) -> None:
        """Writes a part, which must not be empty, unless the client has disconnected."""
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client has read the content of the write buffer."""
        if not self.can_write:
            await self._flow.drain()


async def answer_without_chunks(
    cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs the application for a client of HTTP/1.0, which has no chunked bodies. If the body's
    length is not known in advance, closing the connection marks the body's end.
    """
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
    """Writes the answer's status and headers like uvicorn, but without Transfer-Encoding."""
    headers = (*cycle.default_headers, *message["headers"], (b"connection", b"close"))
    lines = [b"%b: %b\r\n" % header for header in headers]
    cycle.response_started = True
    cycle.chunked_encoding = False
    cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"\r\n"]))
