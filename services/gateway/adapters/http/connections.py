"""What all connections of an HTTP server share: their number, and how fast requests begin."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from services.gateway.adapters.http.connection_limits import ConnectionLimits
from services.gateway.adapters.http.cuts import Cuts

# So many requests begin in one turn of the event loop, so that those that run get their turn, too.
_REQUESTS_A_TURN = 4


class Connection(Protocol):
    """A connection that can be ended."""

    def make_room(self) -> None:
        """Ends it at once."""
        ...


class Doorway:
    """Admits connections up to the limit, and lets their requests begin a few at a time."""

    def __init__(self, limits: ConnectionLimits, on_reader_cut: Callable[[], None]) -> None:
        """`on_reader_cut` is called for each client that was cut since it had stopped reading."""
        self.limits = limits
        self._on_reader_cut = on_reader_cut
        self.cuts = Cuts("HTTP")
        self._connections: set[Connection] = set()
        # Connections without a request, longest waiting first.
        self._waiting: dict[Connection, None] = {}
        self._starts: deque[Callable[[], None]] = deque()

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for a new connection; one without a request may be ended for it."""
        if len(self._connections) >= self.limits.max_connections:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                self.cuts.note("too many connections")
                return False
            self.cuts.note("closed without a request, to make room for another connection")
            self.forget(oldest)
            oldest.make_room()
        self._connections.add(connection)
        self._waiting[connection] = None
        return True

    def reader_was_cut(self) -> None:
        """A connection is ended since its client had stopped reading."""
        self.cuts.note("the client had stopped reading its answer")
        self._on_reader_cut()

    def forget(self, connection: Connection) -> None:
        """The connection has ended. Idempotent."""
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """The connection has no request now."""
        if connection in self._connections:
            self._waiting[connection] = None

    def is_served(self, connection: Connection) -> None:
        """The connection has a request."""
        self._waiting.pop(connection, None)

    def begin(self, start: Callable[[], None]) -> None:
        """Calls `start` soon, after those that came before."""
        self._starts.append(start)
        if len(self._starts) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        for _ in range(min(_REQUESTS_A_TURN, len(self._starts))):
            self._starts.popleft()()
        if self._starts:
            asyncio.get_running_loop().call_soon(self._turn)
