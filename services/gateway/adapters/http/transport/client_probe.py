"""Detects whether a client that has closed its sending side still reads the answer."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BETWEEN_EVENTS = "between_events"
"""Key in the request's state of answers that are event streams. Its value is whether the last event
was sent completely, so that a comment may be written.
"""
_COMMENT_CHUNK = b"3\r\n:\n\n\r\n"
"""An empty comment of an event stream, encoded as a chunk of an HTTP body."""
# Seconds before the first write to the client, and seconds between later writes.
_FIRST_SECONDS, _SECONDS = 0.05, 1.0


class ClientProbe:
    """Writes at intervals to a client that has closed its sending side. If the client has also
    closed its receiving side, its operating system replies with a reset, which closes the
    connection.

    Clients ignore these writes. Before the answer begins, the probe writes `100 Continue`. In an
    event stream, it writes comments between events. Other answers need no probe once they have
    begun, since their bodies are written continuously.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, cycle: RequestResponseCycle) -> None:
        self._write(cycle, _FIRST_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _write(self, cycle: RequestResponseCycle, seconds: float) -> None:
        if self._transport.is_closing() or cycle.response_complete:
            return
        if cycle.scope["http_version"] == "1.0":
            return  # HTTP/1.0 has neither `100 Continue` nor chunks
        state = cycle.scope["state"]
        if not cycle.response_started:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding and BETWEEN_EVENTS in state:
            if state[BETWEEN_EVENTS] and not self._flow.write_paused:
                self._transport.write(_COMMENT_CHUNK)
        else:
            return
        self._timer = self._loop.call_later(seconds, self._write, cycle, _SECONDS)
