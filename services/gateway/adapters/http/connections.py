"""All connections of an HTTP server: how many there may be, and how fast requests start."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from services.gateway.adapters.http.connection_limits import ConnectionLimits
from services.gateway.adapters.http.refusal_log import RefusalLog

# So many requests start in one turn of the event loop; those that run have their turns between.
_REQUESTS_A_TURN = 8


class Connection(Protocol):
    """A connection that can be ended."""

    def end(self) -> None:
        """Ends it at once."""
        ...


class Connections:
    """Admits connections up to the limit, and starts their requests a few at a time."""

    def __init__(self, limits: ConnectionLimits, on_reader_timeout: Callable[[], None]) -> None:
        """`on_reader_timeout` is called for each connection that is ended since its client has
        stopped reading.
        """
        self.limits = limits
        self._on_reader_timeout = on_reader_timeout
        self.refusals = RefusalLog("HTTP")
        self._connections: set[Connection] = set()
        # Connections without a request, the one that has been so for longest first.
        self._idle: dict[Connection, None] = {}
        self._starts: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for a new connection. An idle one may be ended for it."""
        if len(self._connections) >= self.limits.max_connections:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                self.refusals.count("too many connections")
                return False
            self.refusals.count("closed without a request, to make room for another connection")
            self.remove(oldest)
            oldest.end()
        self._connections.add(connection)
        self._idle[connection] = None
        return True

    def reader_timed_out(self) -> None:
        """A connection is ended since its client has stopped reading."""
        self.refusals.count("the client had stopped reading its answer")
        self._on_reader_timeout()

    def remove(self, connection: Connection) -> None:
        """The connection has ended. Idempotent."""
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    def became_idle(self, connection: Connection) -> None:
        """The connection has no request now."""
        if connection in self._connections:
            self._idle[connection] = None

    def became_busy(self, connection: Connection) -> None:
        """The connection has a request."""
        self._idle.pop(connection, None)

    def start_request(self, start: Callable[[], None]) -> None:
        """Calls `start` soon, after those that came before."""
        self._starts.append(start)
        if len(self._starts) == 1:
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        for _ in range(min(_REQUESTS_A_TURN, len(self._starts))):
            self._starts.popleft()()
        if self._starts:
            asyncio.get_running_loop().call_soon(self._start_some)
