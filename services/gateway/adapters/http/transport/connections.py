"""The set of an HTTP server's connections, and the limit on their number."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.adapters.http.transport.quick_refusals import QuickRefusals

_REQUESTS_A_TURN = 4
"""Number of requests that are started in one iteration of the event loop. The number is small, so
that a burst does not delay running requests.
"""


class Starts:
    """Starts the first requests of an iteration of the event loop at once, and further requests in
    later iterations. The requests of one client start in the order of arrival. Clients alternate,
    so that a client with many requests does not delay other clients' requests.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        """Maps each client to its delayed calls of `start`. The first client is served next."""
        self._num_started = 0
        """Number of requests that were started in this iteration of the event loop."""

    def add(self, client: bytes, start: Callable[[], None]) -> None:
        """Calls `start` for a client, at once or in a later iteration of the event loop."""
        if not self._num_started:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._num_started < _REQUESTS_A_TURN:
            self._num_started += 1
            start()
        else:
            self._waiting.setdefault(client, deque()).append(start)

    def _turn(self) -> None:
        self._num_started = min(_REQUESTS_A_TURN, sum(map(len, self._waiting.values())))
        if self._num_started:
            asyncio.get_running_loop().call_soon(self._turn)
        for _ in range(self._num_started):
            client = next(iter(self._waiting))
            starts = self._waiting.pop(client)
            start = starts.popleft()
            if starts:
                self._waiting[client] = starts
            start()


_SHARE = 0.5
"""Limit on the processor time of deferred calls, as a fraction of the processor time of other work
since the last deferred call.
"""


class DeferredCalls:
    """Runs calls in the order of `add`, one in each iteration of the event loop, so that a burst of
    calls delays other work by at most one call. More calls run after a long iteration, because
    otherwise the queue would grow under load: for at most half of the processor time that other
    work took since the last call.
    """

    def __init__(self, processor_seconds: Callable[[], float] = time.thread_time) -> None:
        """`processor_seconds` returns the processor time of the event loop's thread, in seconds."""
        self._processor_seconds = processor_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = 0.0
        """The thread's processor time, in seconds, when the last deferred call ended."""

    def add(self, call: Callable[[], None]) -> None:
        if not self._calls:
            self._next_turn()
        self._calls.append(call)

    def _next_turn(self) -> None:
        self._ended = self._processor_seconds()
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        began = self._processor_seconds()
        until = began + _SHARE * (began - self._ended)
        try:
            for num_made in range(len(self._calls)):
                if num_made and self._processor_seconds() >= until:
                    break
                self._calls.popleft()()
        finally:
            if self._calls:
                self._next_turn()


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
    """Seconds in which the client must read a part of the answer (see ReaderTimeout)."""


class Connection(Protocol):
    """A connection as the class Connections uses it."""

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
        """Parses the input of connections whose last request was refused for lack of room."""
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """The connections without a request, in the order in which they became idle."""

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Adds a connection. If the number of connections is at the limit, closes the connection
        that has been idle for longest, or returns False if no connection is idle.
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
        self.refusals.count("the client stopped reading the answer")
        self._on_reader_timeout()

    def remove(self, connection: Connection) -> None:
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
        logger.warning("HTTP connections were ended or refused: %s", counts)
        self._unlogged.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SECONDS_BETWEEN_LINES, self._log)
