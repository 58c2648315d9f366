"""An HTTP client that uses little processor time, because it shares the processors with the
services that it measures.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

_END_OF_CHUNKS = b"0\r\n\r\n"
_FIRST_TOKENS = b'data: {"id'
_ERROR = b'data: {"error"'


@dataclass(slots=True)
class Ended:
    """The result of one request. Times are in seconds of the monotonic clock."""

    sent: float
    first_token: float | None
    ended: float
    status: int
    error: str = ""
    """The error code in an error answer or in the last event. Empty if there was no error."""

    @property
    def is_done(self) -> bool:
        """Whether the answer was complete."""
        return self.status == 200 and not self.error


class Connection(asyncio.Protocol):
    """Sends one request at a time. The next one may be sent when the answer is complete."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self.is_open = False
        self._on_end: Callable[[Ended], None] | None = None
        self._sent = 0.0
        self._reset()

    def _reset(self) -> None:
        self._head = b""
        self._status = 0
        self._rest = 0
        self._first_token: float | None = None
        self._error = ""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.is_open = True

    def send(self, request: bytes, sent: float, on_end: Callable[[Ended], None]) -> None:
        """Sends a request. `on_end` is called once with the result."""
        assert self._transport is not None
        self._sent, self._on_end = sent, on_end
        self._transport.write(request)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._status = int(head[9:12])
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._rest = int(length) if length else -1
        if self._rest < 0:
            self._chunks(data)
        else:
            self._whole(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_open = False
        self._error = "connection lost"
        self._end()

    def _chunks(self, data: bytes) -> None:
        """Searches a piece of the answer for the first token's event and for errors.

        Nothing else is parsed. An event that arrives in two pieces is missed, which is rare.
        """
        if self._first_token is None and _FIRST_TOKENS in data:
            self._first_token = time.monotonic()
        if _ERROR in data:
            event = data.partition(_ERROR)[2].partition(b"\n\n")[0]
            self._error = str(json.loads(b'{"error"' + event)["error"]["code"])
        if data.endswith(_END_OF_CHUNKS):
            self._end()

    def _whole(self, data: bytes) -> None:
        self._body += data
        if len(self._body) >= self._rest:
            if self._status != 200:
                self._error = str(json.loads(self._body)["error"]["code"])
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is None:
            return
        ended = Ended(self._sent, self._first_token, time.monotonic(), self._status, self._error)
        self._reset()
        on_end(ended)


class Connections:
    """Reusable connections to one server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes) -> Ended:
        """Sends a request and waits for its answer. The measured time includes connecting."""
        loop, sent = asyncio.get_running_loop(), time.monotonic()
        connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.is_open:
            _, connection = await loop.create_connection(Connection, self._host, self._port)
        answer: asyncio.Future[Ended] = loop.create_future()
        connection.send(request, sent, answer.set_result)
        ended = await answer
        if connection.is_open:
            self._idle.append(connection)
        return ended

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
