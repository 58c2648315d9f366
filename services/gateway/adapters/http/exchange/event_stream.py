"""Sends an answer as server-sent events while its pieces arrive."""

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from starlette.types import Send

from services.gateway.adapters.http.exchange.dialect import StreamingDialect
from services.gateway.adapters.http.exchange.request_state import BODY_WRITER
from services.gateway.adapters.http.transport.body_writer import BodyWriter
from services.gateway.adapters.http.transport.client_probe import BETWEEN_EVENTS
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Generation

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disables buffering in proxies, which would delay tokens.
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Sends the pieces of an answer as events in an API's schema. The answer's head (status and
    headers) is sent with the first piece or the first keep-alive, whichever is earlier. Until then
    a refusal by the scheduler can still set the status. Before `begin` only keep-alives are sent.

    If the connection has a BodyWriter, `put` writes most events directly. `drain` sends the head
    and the first events, and the remaining parts of events with long lists. Without a BodyWriter,
    `drain` sends all events.
    """

    def __init__(
        self, keep_alive: bytes, state: dict[str, Any], send: Send, record: RequestRecord
    ) -> None:
        self._generation: Generation
        self._dialect: StreamingDialect
        self._keep_alive = keep_alive
        self._state = state
        self._send = send
        self._record = record
        self._is_open = False
        self._has_begun = False
        """Whether the opening events, which precede the first token, were created."""
        self._time = asyncio.get_running_loop().time
        self.last_sent = 0.0
        """Time of the last write, on the event loop's clock."""
        self._writer: BodyWriter | None = None
        """Writes the body after the head was sent. If it is None, the body is sent through ASGI's
        `send`.
        """
        self._unsent: Iterator[bytes] | None = None

    def begin(self, generation: Generation, dialect: StreamingDialect) -> None:
        """Must be called before the first `put`."""
        self._generation, self._dialect = generation, dialect

    @property
    def is_ready(self) -> bool:
        return self._unsent is None and (self._writer is None or self._writer.can_write)

    def put(self, added: list[Piece]) -> None:
        self.last_sent = self._time()
        if self._has_begun and self._writer is not None and len(added) == 1:
            event = self._dialect.text_event(added[0])
            if event is not None:
                self._writer.write(event)
                return
        self._put_chunks(added)

    def keep_alive(self) -> bool:
        """Sends a keep-alive: an event that clients ignore, and that prevents proxies from closing
        the connection. Returns whether `drain` must be called to send it. Does nothing while other
        events are being sent.
        """
        self.last_sent = self._time()
        if not self.is_ready:
            return False
        if self._writer is None:
            self._unsent = iter((self._keep_alive,))
            return True
        self._writer.write(self._keep_alive)
        return False

    def _put_chunks(self, added: list[Piece]) -> None:
        generation, dialect = self._generation, self._dialect
        chunks = [] if self._has_begun else dialect.opening(generation.usage())
        for piece in added:
            chunks += dialect.chunks(piece)
        self._has_begun = True
        if not chunks and self._is_open:
            return
        events = dialect.encode_chunks(chunks, generation.usage) if chunks else iter(())
        if self._writer is None:
            self._unsent = events
            return
        self._writer.write(next(events))
        if (following := next(events, None)) is not None:
            self._unsent = chain((following,), events)
            self._state[BETWEEN_EVENTS] = False

    async def drain(self) -> None:
        """Sends the unsent events, and waits until the client has read them."""
        if not self._is_open:
            self._is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._writer = self._state.get(BODY_WRITER)
        self._state[BETWEEN_EVENTS] = False
        for number, part in enumerate(self._unsent or ()):
            if number:
                await asyncio.sleep(0)
            await self._send_part(part)
        self._unsent = None
        self._state[BETWEEN_EVENTS] = True
        if self._writer is not None and not self._writer.can_write:
            began = time.perf_counter_ns()
            await self._writer.drain()
            self._record.write_nanos += time.perf_counter_ns() - began

    async def close(self, metrics: dict[str, Any] | None) -> None:
        """Sends the last events of a complete answer."""
        last = self._dialect.closing(self._generation.usage(), metrics)
        await self._send({"type": "http.response.body", "body": last})

    async def _send_part(self, part: bytes) -> None:
        began = time.perf_counter_ns()
        if self._writer is None:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        else:
            await self._writer.drain()
            self._writer.write(part)
        self._record.write_nanos += time.perf_counter_ns() - began
