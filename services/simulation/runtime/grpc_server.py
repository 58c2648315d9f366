"""The server's side of gRPC over the simulated network (`network`).

MemoryServer replaces grpc.aio's server, and ServerCall replaces the context of a call. Both behave
like the originals.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
from grpc import _common
from grpc._cython import cygrpc

from services.simulation.runtime.grpc_call import DEFAULT_WINDOW_BYTES, MemoryCall, Metadata
from services.simulation.runtime.network import End, Network, Pipe, current_process, digest

logger = logging.getLogger(__name__)

_OK, _UNKNOWN, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED, _UNAVAILABLE = 0, 2, 8, 12, 14


class Metadatum(NamedTuple):
    key: str
    value: Any


class _CallDetails(NamedTuple):
    method: str
    invocation_metadata: tuple[Metadatum, ...]


class ServedConnection:
    """The server's side of a client's connection."""

    def __init__(self, server: "MemoryServer", end: End) -> None:
        self.calls: dict[ServerCall, None] = {}
        self.on_goaway: Callable[[], None] = lambda: None
        self.end = end
        self._server = server
        end.on_lost = self._lost
        server.connections[self] = None

    def _lost(self, _: str) -> None:
        self._server.connections.pop(self, None)
        for call in list(self.calls):
            call.reset()


class MemoryServer:
    """Replaces a grpc.aio server with insecure ports."""

    def __init__(
        self,
        network: Network,
        interceptors: Sequence[Any] = (),
        maximum_concurrent_rpcs: int | None = None,
    ) -> None:
        self.network = network
        self.process = current_process()
        self.connections: dict[ServedConnection, None] = {}
        self._interceptors = tuple(interceptors)
        self._max_calls = maximum_concurrent_rpcs
        self._handlers: dict[str, Any] = {}
        self._calls: dict[asyncio.Task[None], None] = {}
        self._addresses: list[str] = []
        self._is_stopping = False
        self._stopped = network.loop.create_future()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Ignores the handlers, which `add_registered_method_handlers` also receives."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        try:
            address = self.network.listen(address, self)
        except OSError as error:
            raise RuntimeError(f"Failed to bind to address {address}") from error
        self._addresses.append(address)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """Does nothing: a bound port accepts connections already."""

    async def stop(self, grace: float | None) -> None:
        self._is_stopping = True
        for address in self._addresses:
            self.network.unlisten(address, self)
        for connection in list(self.connections):
            connection.on_goaway()
        if self._calls and grace:
            await asyncio.wait(list(self._calls), timeout=grace)
        for connection in list(self.connections):
            for call in list(connection.calls):
                call.cancel_by_server()
        if self._calls:
            await asyncio.wait(list(self._calls))
        for connection in list(self.connections):
            connection.end.close()
        self.connections.clear()
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        done, _ = await asyncio.wait({self._stopped}, timeout=timeout)
        return not done

    def accept(self, end: End) -> ServedConnection:
        return ServedConnection(self, end)

    def call(self, client: MemoryCall, up: Pipe, down: Pipe, metadata: Metadata) -> "ServerCall":
        """Creates the server's side of a client's call, without starting it (see `open`)."""
        return ServerCall(self, client, up, down, metadata)

    def open(self, call: "ServerCall", connection: ServedConnection) -> None:
        """Starts the handler of a call when the call arrives at the server."""
        if call.is_reset or not connection.end.is_open or self._is_stopping:
            connection.calls.pop(call, None)
            if not call.is_reset and connection.end.is_open:
                call.end(_UNAVAILABLE, "the server stops")
            return
        is_too_many = self._max_calls is not None and len(self._calls) >= self._max_calls
        task = asyncio.get_running_loop().create_task(
            self._serve(call, is_too_many), name=call.method
        )
        call.task = task
        self._calls[task] = None

        def served(_: object) -> None:
            self._calls.pop(task, None)
            connection.calls.pop(call, None)
            for callback in call.callbacks:
                callback(call)

        task.add_done_callback(served)

    async def _serve(self, call: "ServerCall", is_too_many: bool) -> None:
        try:
            handler = await self._find(
                iter(self._interceptors), _CallDetails(call.method, call.invocation_metadata())
            )
            if handler is None:
                call.end(_UNIMPLEMENTED, "Method not found!")
            elif is_too_many:
                call.end(_RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            else:
                await call.handle(handler)
        except cygrpc.AbortError:
            pass
        except asyncio.CancelledError:
            call.end(_UNAVAILABLE, "the call was cancelled")
        except cygrpc.ExecuteBatchError:
            if not call.is_reset:
                logger.exception("a call failed in core: %s", call.method)
        except Exception as error:
            logger.exception("unexpected error in %s", call.method)
            call.end(_UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _find(self, interceptors: Any, details: _CallDetails) -> Any:
        interceptor = next(interceptors, None)
        if interceptor is None:
            return self._handlers.get(details.method)
        return await interceptor.intercept_service(
            lambda later: self._find(interceptors, later), details
        )


class ServerCall:
    """The server's side of a call, which is also the context of the call's handler."""

    def __init__(
        self, server: MemoryServer, client: MemoryCall, up: Pipe, down: Pipe, metadata: Metadata
    ) -> None:
        self.method = client.method
        self.up, self.down = up, down
        """The pipes to the server and to the client."""
        self.num_unread_bytes = 0
        """Bytes that the client has sent and the server has not read."""
        self.is_reset = False
        """Whether the client has ended the call."""
        self.task: asyncio.Task[None] | None = None
        self.callbacks: list[Callable[[Any], object]] = []
        self._server = server
        self._client = client
        self._metadata = tuple(Metadatum(*pair) for pair in metadata)
        self._timeout = client.time_remaining()
        self._deadline: float | None = None
        """The event loop's time by which the call must end."""
        self._messages: deque[bytes] = deque()
        self._is_half_closed = False
        self._has_ended = False
        self._aborted: Exception | None = None
        self._code: Any = None
        self._details = ""
        self._trailing: Metadata = ()
        self._serialize: Any = None
        self._deserialize: Any = None
        self._changed: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    # Called when something from the client arrives.

    def receive(self, message: bytes) -> None:
        self._server.network.log(f"{self._server.process.name} < {self.method} {digest(message)}")
        self._messages.append(message)
        self._wake()

    def half_close(self) -> None:
        self._is_half_closed = True
        self._wake()

    def reset(self) -> None:
        """Called when the client has cancelled the call, or the connection is lost."""
        if not self.is_reset:
            self.is_reset = True
            if self.task is not None and not self.task.done() and not self._has_ended:
                self.task.cancel()
            self._wake()

    def has_read(self) -> None:
        """Called when the client has read a message."""
        if self._changed:
            self.up.send(self._wake)

    def cancel_by_server(self) -> None:
        self.end(_UNAVAILABLE, "Cancelling all calls")
        if self.task is not None and not self.task.done():
            self.task.cancel()

    # Methods of the handler's context.

    async def handle(self, handler: Any) -> None:
        self._serialize, self._deserialize = (
            handler.response_serializer,
            handler.request_deserializer,
        )
        if self._timeout is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + self._timeout
            self._timer = loop.call_at(self._deadline, self.reset)
        request: Any = self._requests()
        if not handler.request_streaming:
            request = await self.read()
            if request is cygrpc.EOF:
                return
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        if not handler.response_streaming:
            response = await behavior(request, self)
            self._check()
            self._send(_common.serialize(response, self._serialize))
        elif inspect.isasyncgenfunction(behavior):
            async for response in behavior(request, self):
                self._check()
                await self.write(response)
        else:
            await behavior(request, self)
        self._check()
        code = _OK if self._code is None else self._code.value[0]
        self.end(code, self._details, self._trailing)

    async def _requests(self) -> Any:
        while (message := await self.read()) is not cygrpc.EOF:
            yield message

    async def read(self) -> Any:
        self._check()
        while not self._messages and not self._is_half_closed and not self.is_reset:
            await self._change()
        self._check()
        if not self._messages:
            return cygrpc.EOF
        message = self._messages.popleft()
        self.num_unread_bytes -= len(message)
        if self.num_unread_bytes <= DEFAULT_WINDOW_BYTES:
            self.down.send(self._client.wake)
        return _common.deserialize(message, self._deserialize)

    async def write(self, message: Any) -> None:
        self._check()
        if self.is_reset:
            raise cygrpc.ExecuteBatchError("the client is gone")
        self._send(_common.serialize(message, self._serialize))
        while self._client.num_unread_bytes > self._client.window_bytes and not self.is_reset:
            await self._change()

    async def send_initial_metadata(self, _metadata: object) -> None:
        self._check()
        self.down.send(self._client.begun)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        if self._aborted is not None:
            raise cygrpc.UsageError("Abort already called!")
        self._aborted = cygrpc.AbortError("Locally aborted.")
        self._trailing = trailing_metadata or self._trailing
        if self.is_reset:
            raise cygrpc.ExecuteBatchError("the client is gone")
        self.end(code.value[0], details or self._details, self._trailing)
        raise self._aborted

    async def abort_with_status(self, status: Any) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def invocation_metadata(self) -> tuple[Metadatum, ...]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def peer(self) -> str:
        return f"ipv4:{self.up.source.name}:1"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.callbacks.append(callback)

    def done(self) -> bool:
        return self._has_ended

    def cancelled(self) -> bool:
        return self._code is grpc.StatusCode.CANCELLED

    def end(self, code: int, details: str, trailing: Metadata = ()) -> None:
        """Sends the call's status, unless it was sent before."""
        if not self._has_ended:
            self._has_ended = True
            if self._timer is not None:
                self._timer.cancel()
            if not self.is_reset:
                self.down.send(
                    self._client.finish, code, details, tuple(tuple(pair) for pair in trailing)
                )

    def _check(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        if self._has_ended:
            raise cygrpc.UsageError("RPC already finished.")

    def _send(self, message: bytes) -> None:
        if not self.is_reset:
            self._client.num_unread_bytes += len(message)
            self.down.send(self._client.receive, message)

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await future

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)
