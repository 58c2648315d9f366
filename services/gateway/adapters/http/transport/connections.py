"""The set of an HTTP server's connections, and the limit on their number."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.adapters.http.transport.deferred_calls import DeferredCalls
from services.gateway.adapters.http.transport.quick_refusals import QuickRefusals
from services.gateway.adapters.http.transport.starts import Starts

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the connections of a server: their number, the size of bodies, and times."""

    max_connections: int
    max_body_bytes: int
    keep_alive_seconds: float
    """Seconds that a connection may stay open without a request."""
    receive_timeout_seconds: float
    """Seconds in which all headers of a request must arrive. Also the limit on a TLS handshake."""
    body_timeout_seconds: float
    """Seconds in which the whole body of a request must arrive."""
    reader_timeout_seconds: float
    """Seconds in which the client must read a part of the unsent answer."""


class Connection(Protocol):
    """The method of a connection that Connections calls."""

    def end(self) -> None:
        """Closes the connection at once."""


class Connections:
    """Admits connections up to the limit, and keeps the state that all connections share."""

    def __init__(
        self,
        limits: ConnectionLimits,
        on_reader_timeout: Callable[[], None],
        quick_refusals: QuickRefusals | None = None,
    ) -> None:
        """`on_reader_timeout` is called for each connection that is closed because its client has
        stopped reading. `quick_refusals` is None for servers that do not refuse requests under
        load.
        """
        self.limits = limits
        self._on_reader_timeout = on_reader_timeout
        self.quick_refusals = quick_refusals
        self.are_ending = False
        """Whether every connection is closed after its next answer."""
        self.refusals = RefusalLog()
        self.starts = Starts()
        self.refused_turns = DeferredCalls()
        """Runs the parsing calls of connections whose last request was refused for lack of room."""
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """The connections without a request, in the order in which they became idle. All values are
        None.
        """

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Adds a connection. At the limit, the connection that has been idle for longest is closed
        first. Returns False if no connection is idle.
        """
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
        self.refusals.count("the client had stopped reading its answer")
        self._on_reader_timeout()

    def remove(self, connection: Connection) -> None:
        """Removes a connection that has ended. Idempotent."""
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    def became_idle(self, connection: Connection) -> None:
        if connection in self._connections:
            self._idle[connection] = None

    def became_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)


class RefusalLog:
    """Counts connections that were closed or refused, and logs the counts at intervals."""

    def __init__(self) -> None:
        self._unlogged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, reason: str) -> None:
        """Counts one connection. The first connection is logged at once, later connections at the
        end of the interval.
        """
        self._unlogged[reason] += 1
        if self._timer is None:
            self._log()

    def _log(self) -> None:
        self._timer = None
        if not self._unlogged:
            return
        counts = ", ".join(f"{reason} ({count})" for reason, count in self._unlogged.items())
        logger.warning("HTTP: ended or refused: %s", counts)
        self._unlogged.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SECONDS_BETWEEN_LINES, self._log)
