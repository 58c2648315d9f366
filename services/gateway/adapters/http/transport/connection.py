"""An HTTP connection. The class extends uvicorn's class by limits on the size of a client's input
and on the time in which the input must arrive.

uvicorn itself does not limit the size of headers or the time in which they arrive. It never closes
connections that send no request. It drops the request of a client that closes its sending side.
"""

import asyncio
import enum
import time
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.adapters.http.exchange.request_state import (
    ARRIVAL,
    ARRIVED,
    BODY_WRITER,
    CLIENT,
)
from services.gateway.adapters.http.exchange.while_connected import Client
from services.gateway.adapters.http.transport.body_writer import BodyWriter, answer_without_chunks
from services.gateway.adapters.http.transport.client_probe import ClientProbe
from services.gateway.adapters.http.transport.connections import Connections
from services.gateway.adapters.http.transport.quick_refusals import raw_refusal
from services.gateway.adapters.http.transport.reader_timeout import ReaderTimeout
from services.gateway.adapters.http.transport.sliced_protocol import SlicedProtocol
from services.gateway.core.request.arrivals import Arrival

MAX_HEADERS = 100
_MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 8
_KEY_HEADERS = (b"authorization", b"x-api-key")
_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
# After a refusal, the connection stays open for _REFUSAL_READ_SECONDS, so that the client can read
# the answer. If the client sends more than _REFUSAL_UNREAD_BYTES, it is closed earlier.
_REFUSAL_READ_SECONDS, _REFUSAL_UNREAD_BYTES = 1.0, 2**20
_IGNORED_BYTES = 64 * 2**20
"""Limit on the bytes beyond the allowed body size that a client may still send after its request
was refused. These bytes are discarded. At the limit the connection is closed.
"""
CLOSING_SECONDS = 30.0
"""Time limit in seconds within which a client must read the last answer on a connection."""


class _Stage(enum.Enum):
    """The input that is expected next from the client."""

    REQUEST = "the first bytes of the request"
    HEADERS = "the rest of the request's headers"
    BODY = "the rest of the request's body"
    NOTHING = "nothing: its request is being answered"
    END = "nothing: it was refused"


class GuardedConnection(SlicedProtocol):
    """A connection that is closed if its client sends too much, too slowly, or nothing.

    A client may close its sending side and still receive its answer, except over TLS. A ClientProbe
    then detects whether the client is still connected.
    """

    def __init__(self, *, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._stage = _Stage.REQUEST
        self._timed_stage: _Stage | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        """Number of bytes of headers, or of trailers and chunk sizes since the last body byte."""
        self._num_body_bytes = 0
        self._framing: list[bytes] = []
        """The lines of the headers that determine the length of a body that the parser skips."""
        self._refusal: tuple[int, str] | None = None
        self._answered: RequestResponseCycle | None = None
        self._was_refused = False

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._probe = ClientProbe(transport, self.flow)
        limits = self._connections.limits
        self._reader_timeout = ReaderTimeout(
            transport, limits.reader_timeout_seconds, self._reader_timed_out
        )
        self.timeout_keep_alive = limits.keep_alive_seconds  # type: ignore[assignment]
        if self._connections.admit(self):
            self._watch()
        else:
            self._stage = _Stage.END
            transport.write(raw_refusal(503, "the server has too many connections"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._disconnect_application()
        self._unread.clear()
        self._reader_timeout.stop()
        self._probe.stop()
        for timer in (self._timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timeout.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_timeout.stop()

    @property
    def can_wait(self) -> bool:
        """Whether other connections' requests are parsed before this connection's next request. It
        is true if the last request was refused, because then the next one probably is, too.
        """
        return self._was_refused

    def parse_soon(self) -> None:
        if self._was_refused:
            self._connections.refused_turns.add(self.parse_on)
        else:
            super().parse_soon()

    def eof_received(self) -> bool:  # type: ignore[override]
        super().eof_received()
        if self.scheme == "https":  # Python's TLS cannot write after the client has closed its side
            self._disconnect_application()
            return False
        if self._stage is not _Stage.NOTHING or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self._probe.start(self.cycle)
        return True

    def end(self) -> None:
        self._disconnect_application()
        self.transport.abort()

    def _disconnect_application(self) -> None:
        """Marks the request that is being answered as disconnected. Otherwise uvloop would raise
        when the answer is written to the closed connection.

        uvicorn marks only the request that arrived last, and only in `connection_lost`. With
        pipelining, further requests may have arrived after the one that is being answered.
        """
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
            self._client.has_gone()

    def _reader_timed_out(self) -> None:
        self._connections.reader_timed_out()
        self.end()

    # Methods that the parser calls. An exception in one of them ends the parsing. The methods for
    # heads ignore calls in the stage BODY, which are about trailers, or about the head by which
    # `_parse_skipped_body` prepares a parser.

    def on_message_begin(self) -> None:
        if self._stage is _Stage.BODY:
            return
        super().on_message_begin()
        self._stage = _Stage.HEADERS
        self._num_header_bytes = self._num_body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._raise(429, "too many requests before the answer to the first")

    def on_url(self, url: bytes) -> None:
        if self._stage is not _Stage.BODY:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage is _Stage.BODY:
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._raise(431, f"there are more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._stage is _Stage.BODY:
            return
        super().on_headers_complete()
        self._stage = _Stage.BODY
        self._num_header_bytes = 0
        if self.parser.should_upgrade():
            framing = (one for one in self.headers if one[0] in _FRAMING_HEADERS)
            self._framing = [b"%b: %b\r\n" % header for header in framing]
        self._connections.became_busy(self)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_body_bytes += len(body)
        # The application has already refused a body that is too large, but most clients send the
        # whole body before they read the answer, so some more bytes are accepted and discarded.
        if self._num_body_bytes > self._connections.limits.max_body_bytes + _IGNORED_BYTES:
            self._connections.refusals.count("the client continued to send a body that was refused")
            self.end()

    def on_message_complete(self) -> None:
        if self._framing:
            return
        super().on_message_complete()
        self._stage = _Stage.NOTHING

    # Methods that run before and after the application.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if self._connections.are_ending:
            cycle.keep_alive = False
        state = cycle.scope["state"]
        state[ARRIVED] = time.perf_counter_ns()
        if self._is_refused_at_once(cycle):
            return
        state[CLIENT] = self._client = Client(self.flow.resume_reading)
        arrival = state.get(ARRIVAL)
        app = partial(_until_answered, arrival, app)
        if cycle.scope["http_version"] == "1.0":
            app = partial(answer_without_chunks, cycle, app)
        else:
            state[BODY_WRITER] = BodyWriter(cycle)

        def start() -> None:
            if not cycle.disconnected:
                HttpToolsProtocol._start_asgi_task(self, cycle, app)
            elif arrival is not None:
                arrival.end()

        headers = cycle.scope["headers"]
        key = next((value for name, value in headers if name in _KEY_HEADERS), b"")
        self._connections.starts.add(key, start)

    def _is_refused_at_once(self, cycle: RequestResponseCycle) -> bool:
        """Refuses a request by its headers if the server has no room for it."""
        quick = self._connections.quick_refusals
        if quick is None or not cycle.keep_alive or self.flow.write_paused:
            return False
        answer = quick.decide(cast(Scope, cycle.scope), cycle.default_headers)
        self._was_refused = answer is not None
        if answer is None:
            return False
        cycle.response_started = cycle.response_complete = True
        self.transport.write(answer)
        cycle.on_response()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._time(CLOSING_SECONDS, self.end)
        elif self.cycle.response_complete and self._stage is _Stage.NOTHING:
            self._connections.became_idle(self)

    def timeout_keep_alive_handler(self) -> None:
        self._stage = _Stage.END
        super().timeout_keep_alive_handler()
        self._time(CLOSING_SECONDS, self.end)

    # Limits on the size and duration of requests.

    def parse(self, data: bytes) -> None:
        if self._stage is _Stage.END:
            self._num_body_bytes += len(data)
            if self._num_body_bytes > _REFUSAL_UNREAD_BYTES:
                self.end()
            return
        self._unset_keepalive_if_required()
        num_body_bytes = self._num_body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Upgrades are not supported.
            if self._framing:
                self._parse_skipped_body(data[upgrade.args[0] :])
                return
            # The connection is closed after this request's answer.
            self.cycle.keep_alive = False
            self._stage = _Stage.NOTHING
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "the request is not valid HTTP/1.1")))
            return
        if self._num_body_bytes != num_body_bytes:
            self._num_header_bytes = 0
        elif self._stage in (_Stage.HEADERS, _Stage.BODY):
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                self._refuse(431, "the headers are too large")
                return
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._stage is _Stage.NOTHING and is_answered and not self.pipeline:
            # `data` was the rest of a request that was refused before its body was complete.
            self._stage = self._timed_stage = _Stage.REQUEST
            self._time(self._connections.limits.keep_alive_seconds, self._too_slow)
            self._connections.became_idle(self)
        self._watch()

    def _parse_skipped_body(self, data: bytes) -> None:
        """Parses the body of a request that offers an upgrade of the connection, as Java's client
        does by default. `data` is the input after the request's head. httptools regards this input
        as the new protocol's, so another parser continues after a head with the same framing.
        """
        head = b"".join((b"POST / HTTP/1.1\r\n", *self._framing, b"\r\n"))
        self._framing = []
        self.parser = httptools.HttpRequestParser(self)
        self.parse(head + data)

    def _raise(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise ValueError(message)

    def _watch(self) -> None:
        """Sets the timer for the input that is expected next from the client."""
        if self._stage is self._timed_stage:
            return
        self._timed_stage = self._stage
        limits = self._connections.limits
        seconds = {
            _Stage.REQUEST: limits.receive_timeout_seconds,
            _Stage.HEADERS: limits.receive_timeout_seconds,
            _Stage.BODY: limits.body_timeout_seconds,
        }
        self._time(seconds.get(self._stage), self._too_slow)

    def _time(self, seconds: float | None, then: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, then)

    def _too_slow(self) -> None:
        if self._stage is _Stage.REQUEST:
            self._connections.refusals.count("the client sent no request within the time limit")
            self._stage = _Stage.END
            self.transport.close()
        else:
            self._refuse(408, f"{self._stage.value} did not arrive within the time limit")

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection. Sends an error answer first if no answer has begun."""
        self._connections.refusals.count(f"{status} {message}")
        is_answered = self._stage is _Stage.BODY and self.cycle.response_complete
        self._stage = self._timed_stage = _Stage.END
        self._unread.clear()
        self._num_body_bytes = 0
        if is_answered:
            self.end()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.end()
                return
            self._disconnect_application()
        self.transport.write(raw_refusal(status, message))
        # Closing at once with unread input would reset the connection before the client has read
        # the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._time(_REFUSAL_READ_SECONDS, self.end)


async def _until_answered(
    arrival: Arrival | None, app: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs the application. Then ends `arrival`, which the application may have done already, and
    removes the references to the connection from the request's state, since they would form a
    reference cycle.
    """
    try:
        await app(scope, receive, send)
    finally:
        scope["state"].pop(BODY_WRITER, None)
        del scope["state"][CLIENT]
        if arrival is not None:
            arrival.end()
