"""A connection to an HTTP server that serves one exchange at a time.

A stream of tokens arrives in many small chunks. The client's work for each chunk limits the tokens
per second that one process can measure. Therefore an asyncio protocol calls httptools (a thin
binding of the parser of Node.js), without a task, queue or timer for each chunk.
benchmarks/results/bench.md compares the cost with httpx and aiohttp.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from services.cli.bench.core.record import Failure


class Reply(Protocol):
    """Receives the response of one exchange."""

    def headers(self, status: int) -> None:
        """This method is called with the HTTP status when the headers have arrived."""
        ...

    def body(self, data: bytes, now: float) -> None:
        """This method is called with each piece of the body and the piece's time of arrival."""
        ...


class Connection(asyncio.Protocol):
    """An HTTP connection. `clock` is read when bytes arrive, before they are parsed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._ended: asyncio.Future[Failure | None] | None = None
        self._lost = asyncio.Event()
        self._now = 0.0
        self._length_is_known = False
        self._has_status = False

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and free for another exchange."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._ended is None

    async def exchange(self, request: bytes, reply: Reply) -> Failure | None:
        """Sends a request and waits for the end of its response. Returns the reason if the response
        is incomplete, otherwise None. If this call is cancelled, the connection is closed, which
        aborts the request at the server.
        """
        if self._transport is None or self._ended is not None:
            raise RuntimeError("the connection is not idle")
        self._reply = reply
        self._length_is_known = self._has_status = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._reply = self._ended = None

    def close(self) -> None:
        """Starts to close the connection, which aborts a request in progress at the server."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        self.close()
        await self._lost.wait()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Failure("malformed", f"the response is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost.set()
        ends_response = self._has_status and not self._length_is_known and exc is None
        reason = "the connection ended before the answer"
        self._end(None if ends_response else Failure("broken", str(exc or reason)))

    # httptools

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._length_is_known = True

    def on_headers_complete(self) -> None:
        self._has_status = True
        if self._reply is not None:
            self._reply.headers(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.body(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, failure: Failure | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(failure)


_CONNECT_SECONDS = 10.0


class Connections:
    """Connections to one server, one for each concurrent request. The connection that became idle
    last is reused first.
    """

    def __init__(
        self, host: str, port: int, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        self._host, self._port, self._clock, self._tls = host, port, clock, tls
        self._idle: list[Connection] = []

    async def open(self, number: int) -> None:
        """Opens idle connections, so that measurements do not include the time to connect."""
        while len(self._idle) < number:
            self._idle.append(await self._connect())

    async def exchange(self, request: bytes, reply: Reply) -> Failure | None:
        connection = self._take_idle()
        if connection is None:
            try:
                connection = await self._connect()
            except (OSError, TimeoutError) as error:
                return Failure("connect", str(error) or "no connection within the time limit")
        failure = await connection.exchange(request, reply)
        if connection.is_idle:
            self._idle.append(connection)
        return failure

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
        )
        _, connection = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        return connection
