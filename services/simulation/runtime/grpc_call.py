"""The client's side of a gRPC call over the simulated network (`network`)."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from grpc._cython import cygrpc

from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.network import Network, Pipe, digest
from services.simulation.runtime.process import Process

Metadata = tuple[tuple[str, Any], ...]

DEFAULT_WINDOW_BYTES = 65_535
UNAVAILABLE = 14
_OK, _CANCELLED, _DEADLINE_EXCEEDED = 0, 1, 4


class ServedCall(Protocol):
    """The server's side of a call, as the client's side uses it."""

    up: Pipe
    num_unread_bytes: int

    def receive(self, message: bytes) -> None: ...

    def half_close(self) -> None: ...

    def reset(self) -> None: ...

    def has_read(self) -> None: ...


class CallCore(Protocol):
    """The client's connections, as a call uses them."""

    network: Network
    loop: VirtualLoop
    process: Process
    target: str
    window_bytes: int

    async def connected(self, call: "MemoryCall") -> bool: ...

    def begin(self, call: "MemoryCall", metadata: Metadata) -> ServedCall: ...

    def ended(self, call: "MemoryCall") -> None: ...


class MemoryCall:
    """Replaces the `_AioCall` that a call of grpc.aio uses. The call has a status when all its
    messages are read, or when it is broken, cancelled or past its deadline.
    """

    def __init__(
        self, core: CallCore, method: str, deadline: float | None, waits_for_ready: bool
    ) -> None:
        self.method = method
        self.window_bytes = core.window_bytes
        self.waits_for_ready = waits_for_ready
        self.num_unread_bytes = 0
        """Bytes that the server has sent and the client has not read."""
        self.deadline = deadline
        self._core = core
        self._loop = core.loop
        self._status: Any = None
        self._initial_metadata: Metadata | None = None
        self._changed: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[], object]] = []
        self._is_locally_cancelled = False
        self._served: ServedCall | None = None
        self._messages: deque[bytes] = deque()
        self._final: Any = None
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            seconds = max(0.0, deadline - time.time())
            self._timer = self._loop.call_later(seconds, self._too_late)

    # Called by grpc.aio.

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

    # Called when something from the server arrives.

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
        """Ends the call at the client, and drops its unread messages."""
        self._end(code, details)

    def wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

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
