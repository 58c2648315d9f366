"""uvicorn's HTTP protocol, changed so that large input is parsed in slices."""

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_SLICE_BYTES = 16 * 1024
"""Number of bytes that are parsed in one iteration of the event loop."""


class SlicedProtocol(HttpToolsProtocol):
    """Parses each slice of received input in a separate iteration of the event loop. While slices
    are left, no more input is read from the connection.
    """

    def __init__(self, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._unread: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PiecewiseFlow(transport, self)

    def parse(self, data: bytes) -> None:
        raise NotImplementedError

    def parse_soon(self) -> None:
        self.loop.call_soon(self.parse_on)

    @property
    def can_wait(self) -> bool:
        """Whether even the first slice of new input is parsed in a later iteration."""
        return False

    def data_received(self, data: bytes) -> None:
        if not self._unread and len(data) <= _SLICE_BYTES and not self.can_wait:
            self.parse(data)
            return
        is_first = not self._unread
        self._unread.extend(
            data[start : start + _SLICE_BYTES] for start in range(0, len(data), _SLICE_BYTES)
        )
        if len(self._unread) > 1:
            self.transport.pause_reading()
        if is_first:
            self.parse_soon()

    def eof_received(self) -> None:
        """Called when the client has closed its sending side. Earlier input is parsed before this
        end is processed.
        """
        if self._unread:
            self.parse_on()

    def parse_on(self) -> None:
        """Parses the next slice. Does nothing while uvicorn has paused reading
        (`flow.read_paused`), as it does until the current request is answered.
        """
        if self.flow.read_paused or self.transport.is_closing():
            return
        if self._unread:
            self.parse(self._unread.popleft())
        if self.transport.is_closing() or self.flow.read_paused:
            return
        if self._unread:
            self.parse_soon()
        else:
            self.transport.resume_reading()


class _PiecewiseFlow(FlowControl):
    """When uvicorn resumes reading, first parses the input that was already received."""

    def __init__(self, transport: asyncio.Transport, connection: SlicedProtocol) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._connection.loop.call_soon(self._connection.parse_on)
