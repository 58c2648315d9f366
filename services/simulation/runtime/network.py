"""A network in memory: addresses, connections, delays, and partitions.

A connection has two ends. Data arrives at the other end in order, after a delay that is drawn from
the seed. The order across different connections, and across different calls of one gRPC connection,
is not defined. While a direction between two processes is cut, nothing arrives. The data arrives
when the cut ends, because TCP retransmits lost packets. An end that receives nothing for too long
closes the connection, as with gRPC's keepalive and TCP_USER_TIMEOUT.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.process import PROCESS, Process, State

Cut = tuple[str, str]
"""The names of two processes. Data from the first to the second does not arrive."""

CLOSED = "Socket closed"
_FIRST_PORT = 40_000
_CUT_SECONDS = 5.0, 15.0
"""The range of the time after which an end closes a connection because one direction is cut."""
_SILENT_SECONDS = 30.0, 40.0
"""The range of the time after which an end closes a connection to a stopped process."""


class Listener(Protocol):
    """A server at an address."""

    process: Process


class Network:
    """The addresses and connections of a run, and the log of arrived messages."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.lines: list[str] = []
        """The log. Equal seeds must give equal lines."""
        self.errors: list[str] = []
        """The tracebacks that services have logged."""
        self.listeners: dict[str, Listener] = {}
        self.spike_chance = 0.01
        """The probability that a message takes up to 20 ms longer than usual."""
        self._cuts: dict[Cut, object] = {}
        """Maps each cut to an object that distinguishes it from earlier cuts of the direction."""
        self.awaited: dict[tuple[str, str], list[asyncio.Future[None]]] = {}
        """Maps (source, target) to futures that the next arrival at the target sets."""
        self._waiting: dict[Cut, list[Pipe]] = {}
        """Maps cuts to the pipes of the messages that wait, one entry for each message."""
        self.connections: dict[Connection, None] = {}
        """Connections with at least one open end."""
        self._next_port = _FIRST_PORT

    def log(self, line: str) -> None:
        self.lines.append(f"{self.loop.time():.6f} {line}")

    def delay(self, source: str, target: str) -> float:
        """Draws the time that a message takes from one process to another, in seconds."""
        rng = self.loop.rng_of(source, target)
        seconds = 0.00005 + 0.0002 * rng.random()
        if rng.random() < self.spike_chance:
            seconds += 0.02 * rng.random()
        return seconds

    # Addresses.

    def listen(self, address: str, listener: Listener) -> str:
        """Binds an address and returns it. Port 0 selects a free port. Raises OSError."""
        host, _, port = address.rpartition(":")
        if port == "0":
            self._next_port += 1
            address = f"{host}:{self._next_port}"
        if address in self.listeners:
            raise OSError(98, "Address already in use")
        self.listeners[address] = listener
        listener.process.at_end.append(lambda: self.unlisten(address, listener))
        return address

    def unlisten(self, address: str, listener: Listener) -> None:
        if self.listeners.get(address) is listener:
            del self.listeners[address]

    # Connections and cuts.

    def reaches(self, one: Process, other: Process) -> bool:
        """Whether neither direction between two processes is cut."""
        return not self._cuts or (
            (one.name, other.name) not in self._cuts and (other.name, one.name) not in self._cuts
        )

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._cuts

    def cut(self, source: Process, target: Process) -> None:
        """Cuts one direction between two processes."""
        cut, this = (source.name, target.name), object()
        self._cuts[cut] = this
        for connection in self.connections:
            if connection.joins(source, target):
                self._watch(connection, _CUT_SECONDS, lambda: self._cuts.get(cut) is this)

    def mend(self, source: Process, target: Process) -> None:
        """Ends the cut of one direction. Waiting data is sent again."""
        cut = source.name, target.name
        self._cuts.pop(cut, None)
        for pipe in self._waiting.pop(cut, ()):
            pipe.deliver_next()

    def are_connected(self, one: Process, other: Process) -> bool:
        return any(connection.joins(one, other) for connection in self.connections)

    def reset(self, one: Process, other: Process) -> None:
        for connection in list(self.connections):
            if connection.joins(one, other):
                for end in connection.ends:
                    self.loop.call_soon(
                        end.lose, "Connection reset by peer", context=end.process.context
                    )

    async def arrival(self, source: Process, target: Process) -> None:
        arrived = self.loop.create_future()
        self.awaited.setdefault((source.name, target.name), []).append(arrived)
        await arrived

    def arrives(self, source: Process, target: Process) -> None:
        for arrived in self.awaited.pop((source.name, target.name), ()):
            if not arrived.done():
                arrived.set_result(None)

    def wait(self, pipe: "Pipe") -> None:
        self._waiting.setdefault((pipe.source.name, pipe.target.name), []).append(pipe)

    def stopped(self, process: Process) -> None:
        """Makes the peers of a stopped process close their connections if it stays stopped."""
        this = process.num_stops

        def stays_stopped() -> bool:
            return process.state is State.STOPPED and process.num_stops == this

        for connection in self.connections:
            if connection.has(process):
                self._watch(connection, _SILENT_SECONDS, stays_stopped)

    def _watch(
        self, connection: "Connection", seconds: tuple[float, float], fails: Callable[[], bool]
    ) -> None:
        if not connection.has_keepalive:
            return
        for end in connection.ends:

            def check(end: End = end) -> None:
                if fails() and end.is_open:
                    end.pipe.send(connection.other(end).lose, CLOSED)
                    end.lose("ping timeout")

            after = self.loop.rng_of("silence", end.process.name).uniform(*seconds)
            self.loop.call_later(after, check, context=end.process.context)

    def add(self, connection: "Connection") -> None:
        self.connections[connection] = None

    def remove(self, connection: "Connection") -> None:
        self.connections.pop(connection, None)


class Pipe:
    """One direction between two processes. Messages arrive in order, also if some of them were
    sent again after a cut and others are on their way.
    """

    __slots__ = ("_context", "_due", "_messages", "_network", "source", "target")

    def __init__(
        self,
        network: Network,
        source: Process,
        target: Process,
        context: contextvars.Context | None = None,
    ) -> None:
        """Messages arrive in `context`, by default the target's context."""
        self._network = network
        self.source = source
        self.target = target
        self._context = target.context if context is None else context
        self._due = 0.0
        self._messages: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def send(self, callback: Callable[..., object], *args: Any) -> None:
        """Calls a function in the target's process after a delay."""
        self._messages.append((callback, args))
        self.deliver_next()

    def deliver_next(self) -> None:
        """Delivers, after a delay, the first message that has not arrived then."""
        network = self._network
        due = max(
            network.loop.time() + network.delay(self.source.name, self.target.name), self._due
        )
        self._due = due
        network.loop.call_exactly(due, self._arrive, context=self._context)

    def _arrive(self) -> None:
        if self._network.is_cut(self.source, self.target):
            self._network.wait(self)
        else:
            callback, args = self._messages.popleft()
            callback(*args)
            if self._network.awaited:
                self._network.arrives(self.source, self.target)


class End:
    """One end of a connection."""

    def __init__(self, connection: "Connection", process: Process, pipe: Pipe) -> None:
        self.process = process
        self.pipe = pipe
        self.is_open = True
        self.on_lost: Callable[[str], None] = lambda _: None
        """Called once, with the reason, if the peer or the network ends the connection."""
        self._connection = connection
        self._kernel = self.close
        process.at_end.append(self._kernel)

    def close(self) -> None:
        """Closes the connection from this end. The other end is lost after a delay."""
        if self.is_open:
            self._end()
            self.pipe.send(self._connection.other(self).lose, CLOSED)

    def lose(self, reason: str) -> None:
        """Ends the connection at this end, and calls `on_lost`."""
        if self.is_open:
            self._end()
            self.on_lost(reason)

    def _end(self) -> None:
        self.is_open = False
        if self._kernel in self.process.at_end and self.process.state is not State.DEAD:
            self.process.at_end.remove(self._kernel)
        if not self._connection.other(self).is_open:
            self._connection.end()


class Connection:
    """A connection between two processes. `ends` are the client's end and the server's end."""

    def __init__(
        self, network: Network, client: Process, server: Process, *, has_keepalive: bool
    ) -> None:
        self._network = network
        self.has_keepalive = has_keepalive
        self.ends = (
            End(self, client, Pipe(network, client, server)),
            End(self, server, Pipe(network, server, client)),
        )
        network.add(self)
        for end in self.ends:
            if end.process.is_dead:  # its process died before the connection was accepted
                end.close()

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def has(self, process: Process) -> bool:
        return any(end.process is process for end in self.ends)

    def joins(self, one: Process, other: Process) -> bool:
        return self.has(one) and self.has(other)

    def end(self) -> None:
        self._network.remove(self)


def current_process() -> Process:
    """The process whose code runs now."""
    return PROCESS.get()


def digest(data: bytes) -> str:
    """The length and the CRC-32 checksum of `data`, for the log."""
    return f"{len(data)} {crc32(data):08x}"
