"""The client's side of gRPC over the simulated network (`network`).

Channels and calls, with their statuses, deadlines and cancellation, behave as in grpc.aio. Only the
objects of gRPC's core that grpc.aio uses are replaced: AioChannel by MemoryCore, and _AioCall by
MemoryCall. Messages are bytes.
"""

import asyncio
from functools import partial
from typing import Any

from grpc._cython import cygrpc
from grpc.aio._channel import Channel

from services.simulation.runtime.grpc_call import (
    DEFAULT_WINDOW_BYTES,
    UNAVAILABLE,
    MemoryCall,
    Metadata,
)
from services.simulation.runtime.grpc_server import MemoryServer, ServedConnection, ServerCall
from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.network import (
    CLOSED,
    Connection,
    End,
    Network,
    Pipe,
    current_process,
)
from services.simulation.runtime.process import Process

_CONNECT_SECONDS = 5.0
"""Limit on an attempt to connect."""
_BACKOFF_SECONDS = 0.1, 0.25
"""The range of the time between two attempts to connect."""
_IDLE, _CONNECTING, _READY, _FAILED, _SHUTDOWN = range(5)


class MemoryChannel(Channel):
    """A grpc.aio channel that uses the network in memory."""

    def __init__(self, network: Network, target: str, options: Any) -> None:
        self._unary_unary_interceptors = []
        self._unary_stream_interceptors = []
        self._stream_unary_interceptors = []
        self._stream_stream_interceptors = []
        self._loop = network.loop
        self._channel = MemoryCore(network, target, dict(options or ()))
        self._active_calls = _OrderedCalls()  # type: ignore[assignment]


class _OrderedCalls:
    """Replaces grpc.aio's set of calls: iterates over them in the order in which they began."""

    def __init__(self) -> None:
        self._calls: dict[int, Any] = {}

    def add(self, call: Any) -> None:
        self._calls[id(call)] = call

    def discard(self, call: Any) -> None:
        self._calls.pop(id(call), None)

    def clear(self) -> None:
        self._calls.clear()

    def __iter__(self) -> Any:
        return iter(list(self._calls.values()))


class MemoryCore:
    """Replaces AioChannel: connects to an address, and begins calls on the connection. After a
    failed attempt it tries again by itself. After a broken connection it waits for the next call.
    """

    def __init__(self, network: Network, target: str, options: dict[str, Any]) -> None:
        self.network = network
        self.loop: VirtualLoop = network.loop
        self.process = current_process()
        lookahead = options.get("grpc.http2.lookahead_bytes", 0)
        self.window_bytes = max(DEFAULT_WINDOW_BYTES, lookahead)
        self.target = target
        self._state = _IDLE
        self._end: End | None = None
        self._server: MemoryServer | None = None
        self._calls: dict[MemoryCall, End] = {}
        """Maps running calls to the client's ends of their connections."""
        self._waiting: dict[MemoryCall, asyncio.Future[bool]] = {}
        self._state_waiters: list[asyncio.Future[bool]] = []
        self._is_closing = False
        self._failure = ""

    # Called by grpc.aio.Channel.

    def closed(self) -> bool:
        return self._state == _SHUTDOWN

    def closing(self) -> None:
        self._is_closing = True

    def close(self) -> None:
        if self._state != _SHUTDOWN:
            self._set_state(_SHUTDOWN)
            if self._end is not None:
                self._end.close()

    def check_connectivity_state(self, try_to_connect: bool) -> int:
        if try_to_connect and self._state == _IDLE:
            self._connect()
        return self._state

    async def watch_connectivity_state(self, last_observed: int, _deadline: float | None) -> bool:
        if self._state == last_observed:
            waiter = self.loop.create_future()
            self._state_waiters.append(waiter)
            await waiter
        return True

    def get_registered_call_handle(self, _method: bytes) -> int:
        return 1

    def call(
        self,
        method: bytes,
        deadline: float | None,
        _credentials: Any,
        wait_for_ready: bool | None,
        *_: Any,
    ) -> MemoryCall:
        if self._is_closing or self._state == _SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        return MemoryCall(self, method.decode(), deadline, bool(wait_for_ready))

    # Connections.

    async def connected(self, call: MemoryCall) -> bool:
        """Waits until `call` can begin, and returns True. Returns False if the call has ended."""
        while self._state != _READY:
            if self._state == _FAILED and not call.waits_for_ready:
                call.fail(UNAVAILABLE, self._failure)
                return False
            waiter = self._waiting[call] = self.loop.create_future()
            if self._state == _IDLE:
                self._connect()
            try:
                if not await waiter:
                    return False
            finally:
                self._waiting.pop(call, None)
        return True

    def begin(self, call: MemoryCall, metadata: Metadata) -> ServerCall:
        assert self._server is not None
        assert self._end is not None
        server, client = self._server, self.process
        self._calls[call] = self._end
        up = Pipe(self.network, client, server.process)
        down = Pipe(self.network, server.process, client)
        served = server.call(call, up, down, metadata)
        self._served.calls[served] = None
        up.send(server.open, served, self._served)
        return served

    def ended(self, call: MemoryCall) -> None:
        self._calls.pop(call, None)
        if (waiter := self._waiting.pop(call, None)) is not None and not waiter.done():
            waiter.set_result(False)

    def _set_state(self, state: int) -> None:
        self._state = state
        waiters, self._state_waiters = self._state_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(True)

    def _connect(self) -> None:
        if self._state == _IDLE:
            self._set_state(_CONNECTING)
        attempt = _Attempt(self)
        attempt.begin()

    def _try_again(self) -> None:
        if self._state == _FAILED:
            self._connect()

    def attempt_failed(self, reason: str) -> None:
        if self._state == _SHUTDOWN:
            return
        self._failure = (
            f"failed to connect to all addresses; last error: UNKNOWN: ipv4:{self.target}: {reason}"
        )
        self._set_state(_FAILED)
        for call in list(self._waiting):
            if not call.waits_for_ready:
                call.fail(UNAVAILABLE, self._failure)
        rng = self.loop.rng_of("backoff", self.process.name, self.target)
        self.loop.call_later(rng.uniform(*_BACKOFF_SECONDS), self._try_again)

    def attempt_succeeded(
        self, server: MemoryServer, connection: Connection, served: ServedConnection
    ) -> None:
        if self._state == _SHUTDOWN:
            connection.ends[0].close()
            return
        self._end, self._server, self._served = connection.ends[0], server, served
        self._end.on_lost = partial(self._lost, self._end)
        served.on_goaway = partial(connection.ends[1].pipe.send, self._going_away)
        self._set_state(_READY)
        for waiter in list(self._waiting.values()):
            if not waiter.done():
                waiter.set_result(True)

    def _going_away(self) -> None:
        """The server accepts no more calls on this connection. Running calls continue."""
        if self._state == _READY:
            self._set_state(_IDLE)

    def _lost(self, lost: End, reason: str) -> None:
        if self._state == _READY and lost is self._end:
            self._set_state(_IDLE)
        for call, end in list(self._calls.items()):
            if end is lost:
                call.fail(UNAVAILABLE, reason)


class _Attempt:
    def __init__(self, core: MemoryCore) -> None:
        self._core = core
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._server: Process | None = None
        """The server's process until it accepts the connection."""

    def begin(self) -> None:
        core = self._core
        network = core.network
        listener: Any = network.listeners.get(core.target)
        self._timer = core.loop.call_later(
            _CONNECT_SECONDS,
            self._fail,
            "connection attempt timed out before receiving SETTINGS frame",
        )
        if listener is None:
            core.loop.call_later(
                network.delay(core.process.name, core.target),
                self._fail,
                "Failed to connect to remote host: Connection refused",
            )
            return
        self._server = listener.process
        self._server.at_end.append(self._reset)
        pipe = Pipe(network, core.process, listener.process)
        pipe.send(self._arrived, listener)

    def _reset(self) -> None:
        """Ends the attempt as the kernel does if a server ends before it accepts a connection."""
        assert self._server is not None
        back = Pipe(self._core.network, self._server, self._core.process)
        back.send(self._fail, "Connection reset by peer")

    def _arrived(self, listener: MemoryServer) -> None:
        """Runs in the server's process."""
        self._forget_server()
        core = self._core
        back = Pipe(core.network, listener.process, core.process)
        if core.network.listeners.get(core.target) is not listener:
            back.send(self._fail, "Failed to connect to remote host: Connection refused")
            return
        connection = Connection(core.network, core.process, listener.process, has_keepalive=True)
        served = listener.accept(connection.ends[1])
        back.send(self._succeed, listener, connection, served)

    def _succeed(self, listener: MemoryServer, connection: Connection, served: Any) -> None:
        if self._is_over:
            connection.ends[0].close()
            return
        self._end()
        if not connection.ends[0].is_open:
            self._core.attempt_failed(CLOSED)
        else:
            self._core.attempt_succeeded(listener, connection, served)

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self._end()
            self._core.attempt_failed(reason)

    def _end(self) -> None:
        self._is_over = True
        self._forget_server()
        if self._timer is not None:
            self._timer.cancel()

    def _forget_server(self) -> None:
        server, self._server = self._server, None
        if server is not None and not server.is_dead:
            server.at_end.remove(self._reset)
