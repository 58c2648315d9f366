"""The client's side of gRPC over the network in memory.

Channels and calls are grpc.aio's own, with its statuses, deadlines and cancellation. Only what they
call in gRPC's core is replaced: MemoryCore stands for its AioChannel, and MemoryCall for its
_AioCall. Messages are bytes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc
from grpc.aio._channel import Channel

from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.network import (
    CLOSED,
    Connection,
    End,
    Network,
    Pipe,
    current_process,
    digest,
)

if TYPE_CHECKING:
    from services.simulation.runtime.grpc_server import MemoryServer, ServedConnection, ServerCall

Metadata = tuple[tuple[str, Any], ...]

DEFAULT_WINDOW_BYTES = 65_535
_CONNECT_SECONDS = 5.0
"""Limit on an attempt to connect."""
_BACKOFF_SECONDS = 0.1, 0.25
"""The range of the time between two attempts."""
_OK, _CANCELLED, _DEADLINE_EXCEEDED, _UNAVAILABLE = 0, 1, 4, 14
_IDLE, _CONNECTING, _READY, _FAILED, _SHUTDOWN = range(5)


class MemoryChannel(Channel):
    """A grpc.aio channel in memory."""

    def __init__(self, network: Network, target: str, options: Any) -> None:
        self._unary_unary_interceptors = []
        self._unary_stream_interceptors = []
        self._stream_unary_interceptors = []
        self._stream_stream_interceptors = []
        self._loop = network.loop
        self._channel = MemoryCore(network, target, dict(options or ()))
        self._active_calls = _OrderedCalls()  # type: ignore[assignment]


class _OrderedCalls:
    """Calls in the order in which they began."""

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
    """Connects to an address, and begins calls on the connection. After a failed attempt it
    connects again by itself. After a broken connection it waits for the next call.
    """

    def __init__(self, network: Network, target: str, options: dict[str, Any]) -> None:
        self.network = network
        self.loop: VirtualLoop = network.loop
        self.process = current_process()
        lookahead = options.get("grpc.http2.lookahead_bytes", 0)
        self.window_bytes = max(DEFAULT_WINDOW_BYTES, lookahead)
        self._target = target
        self._state = _IDLE
        self._end: End | None = None
        self._server: MemoryServer | None = None
        self._calls: dict[MemoryCall, End] = {}
        """The running calls, and the connection of each."""
        self._waiting: dict[MemoryCall, asyncio.Future[bool]] = {}
        self._state_waiters: list[asyncio.Future[bool]] = []
        self._is_closing = False
        self._failure = ""

    # What grpc.aio.Channel calls.

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
    ) -> "MemoryCall":
        if self._is_closing or self._state == _SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        return MemoryCall(self, method.decode(), deadline, bool(wait_for_ready))

    # Connections.

    async def connected(self, call: "MemoryCall") -> bool:
        """Waits until `call` can begin. Returns whether it can. Otherwise the call has ended."""
        while self._state != _READY:
            if self._state == _FAILED and not call.waits_for_ready:
                call.fail(_UNAVAILABLE, self._failure)
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

    def begin(self, call: "MemoryCall", metadata: Metadata) -> "ServerCall":
        """Opens a call's stream on the connection."""
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

    def ended(self, call: "MemoryCall") -> None:
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
            "failed to connect to all addresses; last error: UNKNOWN: "
            f"ipv4:{self._target}: {reason}"
        )
        self._set_state(_FAILED)
        for call in list(self._waiting):
            if not call.waits_for_ready:
                call.fail(_UNAVAILABLE, self._failure)
        self.loop.call_later(self.loop.rng.uniform(*_BACKOFF_SECONDS), self._try_again)

    def attempt_succeeded(
        self, server: "MemoryServer", connection: Connection, served: "ServedConnection"
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
        """The server accepts no more calls on this connection. Running calls go on."""
        if self._state == _READY:
            self._set_state(_IDLE)

    def _lost(self, lost: End, reason: str) -> None:
        if self._state == _READY and lost is self._end:
            self._set_state(_IDLE)
        for call, end in list(self._calls.items()):
            if end is lost:
                call.fail(_UNAVAILABLE, reason)

    @property
    def target(self) -> str:
        return self._target


class _Attempt:
    """An attempt to connect."""

    def __init__(self, core: MemoryCore) -> None:
        self._core = core
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

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
                network.delay(), self._fail, "Failed to connect to remote host: Connection refused"
            )
            return
        pipe = Pipe(network, core.process, listener.process)
        pipe.send(self._arrived, listener)

    def _arrived(self, listener: "MemoryServer") -> None:
        """In the server's process."""
        core = self._core
        back = Pipe(core.network, listener.process, core.process)
        if core.network.listeners.get(core.target) is not listener:
            back.send(self._fail, "Failed to connect to remote host: Connection refused")
            return
        connection = Connection(core.network, core.process, listener.process, has_keepalive=True)
        served = listener.accept(connection.ends[1])
        back.send(self._succeed, listener, connection, served)

    def _succeed(self, listener: "MemoryServer", connection: Connection, served: Any) -> None:
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
        if self._timer is not None:
            self._timer.cancel()


class MemoryCall:
    """A call as grpc.aio's calls see gRPC's core. Its status is known when all messages before it
    are read, or when the call is broken, cancelled or too late.
    """

    def __init__(
        self, core: MemoryCore, method: str, deadline: float | None, waits_for_ready: bool
    ) -> None:
        self.method = method
        self.window_bytes = core.window_bytes
        self.waits_for_ready = waits_for_ready
        self.num_unread_bytes = 0
        """What the server has sent and this side has not read."""
        self.deadline = deadline
        self._core = core
        self._loop = core.loop
        self._status: Any = None
        self._initial_metadata: Metadata | None = None
        self._changed: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[], object]] = []
        self._is_locally_cancelled = False
        self._served: ServerCall | None = None
        self._messages: deque[bytes] = deque()
        self._final: Any = None
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            seconds = max(0.0, deadline - time.time())
            self._timer = self._loop.call_later(seconds, self._too_late)

    # What grpc.aio's calls call.

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        if self.done():
            callback()
        else:
            self._done_callbacks.append(callback)

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.time())

    def cancel(self, details: str) -> None:
        self._is_locally_cancelled = True
        self._end(_CANCELLED, details)

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self.done() and self._status.code() == _CANCELLED

    def is_ok(self) -> bool:
        return self.done() and self._status.code() == _OK

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def set_internal_error(self, error: str) -> None:
        self._set_status(cygrpc.AioRpcStatus(13, "Internal error from Core", (), error))

    async def status(self) -> Any:
        await self._until(lambda: self._status is not None)
        return self._status

    async def initial_metadata(self) -> Metadata:
        await self._until(lambda: self._initial_metadata is not None)
        return self._initial_metadata or ()

    async def unary_unary(
        self, request: bytes, metadata: Metadata, _: object = None
    ) -> bytes | None:
        if await self._begin(metadata):
            self._send(request)
            self._half_close()
        return await self._only_message()

    async def stream_unary(
        self, metadata: Metadata, metadata_sent: Callable[[], None], _: object = None
    ) -> bytes | None:
        await self._begin(metadata)
        metadata_sent()
        return await self._only_message()

    async def initiate_unary_stream(
        self, request: bytes, metadata: Metadata, _: object = None
    ) -> None:
        if await self._begin(metadata):
            self._send(request)
            self._half_close()
        await self.initial_metadata()

    async def initiate_stream_stream(
        self, metadata: Metadata, metadata_sent: Callable[[], None], _: object = None
    ) -> None:
        await self._begin(metadata)
        metadata_sent()
        await self.initial_metadata()

    async def receive_serialized_message(self) -> Any:
        await self._until(lambda: bool(self._messages) or self._status is not None)
        if not self._messages:
            return cygrpc.EOF
        return self._take()

    async def send_serialized_message(self, message: bytes) -> None:
        if self._status is not None or self._final is not None:
            raise cygrpc.InternalError("the call has ended")
        self._send(message)
        served = self._served
        assert served is not None
        await self._until(
            lambda: self._has_ended or served.num_unread_bytes <= DEFAULT_WINDOW_BYTES
        )

    async def send_receive_close(self) -> None:
        self._half_close()

    @property
    def _has_ended(self) -> bool:
        return self._status is not None or self._final is not None

    # What the server sends.

    def begun(self) -> None:
        if self._initial_metadata is None:
            self._initial_metadata = ()
            self.wake()

    def receive(self, message: bytes) -> None:
        self._log("<", digest(message))
        self.begun()
        if not self._has_ended:
            self._messages.append(message)
            self.wake()

    def finish(self, code: int, details: str, trailing: Metadata) -> None:
        self._log("<", f"status {code} {details}")
        self.begun()
        if not self._has_ended:
            self._final = cygrpc.AioRpcStatus(code, details, trailing, "")
            self._finish_if_read()
            self.wake()

    def fail(self, code: int, details: str) -> None:
        """Ends the call at this side, and drops what is unread."""
        self._end(code, details)

    def wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    # The rest.

    async def _begin(self, metadata: Metadata) -> bool:
        if self.done() or not await self._core.connected(self) or self.done():
            return False
        self._log(">", "begins")
        self._served = self._core.begin(self, metadata)
        return True

    async def _only_message(self) -> bytes | None:
        await self._until(lambda: self._final is not None or self._status is not None)
        message = self._take() if self._messages else None
        self._finish_if_read()
        return message

    def _take(self) -> bytes:
        message = self._messages.popleft()
        self.num_unread_bytes -= len(message)
        if self._served is not None:
            self._served.has_read()
        self._finish_if_read()
        return message

    def _send(self, message: bytes) -> None:
        if self._served is not None:
            self._served.num_unread_bytes += len(message)
            self._served.up.send(self._served.receive, message)

    def _half_close(self) -> None:
        if self._served is not None:
            self._served.up.send(self._served.half_close)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future = self._loop.create_future()
            self._changed.append(future)
            await future

    def _finish_if_read(self) -> None:
        if self._final is not None and not self._messages and self._status is None:
            self._set_status(self._final)

    def _too_late(self) -> None:
        self._end(_DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self, code: int, details: str) -> None:
        if self._status is None:
            self._log(">", f"ends {code} {details}")
            self._messages.clear()
            if self._final is None and self._served is not None:
                self._served.up.send(self._served.reset)
            self._set_status(cygrpc.AioRpcStatus(code, details, (), ""))

    def _set_status(self, status: Any) -> None:
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._initial_metadata is None:
            self._initial_metadata = ()
        self._core.ended(self)
        self.wake()
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            callback()

    def _log(self, direction: str, what: str) -> None:
        core = self._core
        core.network.log(f"{core.process.name} {direction} {core.target} {self.method} {what}")
