"""The grpc.aio server of every service, with health, reflection, error statuses and drain."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isasyncgenfunction
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import errors
from services.common.process.health_file import HealthFile
from services.common.rpc import status
from services.common.rpc.addresses import (
    is_unix_address,
    remove_abandoned,
    split_host_port,
    unix_path,
)
from services.common.rpc.channel import KEEPALIVE_OPTIONS
from services.common.rpc.local_server import LocalServer
from services.common.rpc.local_stream import streams_path
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES
from services.common.tls.credentials import Tls

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[Context], None]

logger = logging.getLogger(__name__)

LIVENESS = ""
"""The name in grpc.health.v1 for liveness. If it is not SERVING, the process must be replaced."""
READINESS = "ready"
"""The name in grpc.health.v1 for readiness. If it is SERVING, requests can be served now."""
_MAX_HEALTH_RPCS = 64
"""Limit on the concurrent calls on an address that serves only health."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A second server on one port must fail, instead of silently receiving some of the connections.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    # The shortest permitted interval between pings of a client without traffic. After two shorter
    # intervals the server closes the connection ("Too many pings"). grpc's default is five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # Limit on the time of the TLS handshake and the start of HTTP/2.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Otherwise grpc would buffer megabytes of a stream that is not read.
    ("grpc.http2.bdp_probe", 0),
)


class GrpcServer:
    """Several services on one port. Call `add` for each service, then `start`, and finally `drain`.

    The health service reports liveness under the name "", and readiness under "ready" and under
    each service's name. `max_concurrent_rpcs` limits the running calls, including long streams.
    Further calls are rejected with RESOURCE_EXHAUSTED. `options` extend or replace SERVER_OPTIONS.
    Handlers that `interceptors` return may raise StepwellError.
    """

    def __init__(
        self,
        *,
        max_concurrent_rpcs: int | None = None,
        options: Mapping[str, int] | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: Tls | None = None,
        has_local_streams: bool = False,
        max_received_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """With `tls`, network clients must use TLS, and only clients that `tls` allows are served.
        With `has_local_streams`, a server at unix:PATH also serves bidirectional streams at
        PATH.streams (`LocalStream`). These calls bypass `interceptors`. A message from a client has
        at most `max_received_bytes` bytes.
        """
        self._tls = tls
        self._local = (
            LocalServer(max_concurrent_rpcs, max_received_bytes=max_received_bytes)
            if has_local_streams
            else None
        )
        limits = {"grpc.max_receive_message_length": max_received_bytes}
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(tls), *interceptors],
            options=tuple((dict(SERVER_OPTIONS) | limits | dict(options or {})).items()),
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health_server: grpc.aio.Server | None = None
        self._names: list[str] = []
        self._health_file: HealthFile | None = None
        self._beating: asyncio.Task[None] | None = None
        self._draining = False
        self._stopping: asyncio.Task[None] | None = None

    def add(self, register: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Serves `servicer`. `register` is the generated function that adds it to a server. `name`
        is the full name of the service.
        """
        register(servicer, self._server)
        self._names.append(name)
        if self._local is not None:
            register(servicer, _StreamHandlers(self._local, self._tls))

    async def start(
        self, address: str, health_address: str | None = None, health_file: Path | None = None
    ) -> str:
        """Binds and serves. The service is live, but not ready until `set_ready`. Returns the bound
        address. `address` is host:port, with port 0 for a free port, or unix:PATH. `health_address`
        serves only health, without TLS. `health_file` also shows the service's health
        (`HealthFile`). Raises Unavailable.
        """
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        if health_file is not None:
            self._health_file = HealthFile(health_file)
            self._health_file.write()
            self._beating = asyncio.create_task(self._health_file.run(), name="health file")
        await self.set_live(True)
        await self.set_ready(False)
        port = _bind(self._server, address, self._tls)
        if health_address is not None:
            self._health_server = grpc.aio.server(
                options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_HEALTH_RPCS
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            _bind(self._health_server, health_address, None)
            await self._health_server.start()
        if self._local is not None and is_unix_address(address):
            _listen(self._local, streams_path(unix_path(address)))
        await self._server.start()
        return address if is_unix_address(address) else f"{address.rpartition(':')[0]}:{port}"

    async def set_ready(self, ready: bool) -> None:
        """Sets readiness. After `drain` has begun, the service stays not ready."""
        if self._health_file is not None:
            self._health_file.set_ready(ready and not self._draining)
        for name in (READINESS, *self._names):
            await self._health.set(name, _status(ready and not self._draining))

    async def set_live(self, live: bool) -> None:
        """Sets liveness. A supervisor replaces a process that is not live."""
        if self._health_file is not None:
            self._health_file.set_live(live)
        await self._health.set(LIVENESS, _status(live))

    def begin_drain(self, grace_seconds: float) -> None:
        """Begins to reject calls, except on the health address. Call `drain` afterwards."""
        self._stopping = asyncio.create_task(self._stop(grace_seconds))

    async def end_calls(self, grace_seconds: float) -> None:
        """Like `drain`, but the health address stays available."""
        self._draining = True
        await self.set_ready(False)
        await self._stop(grace_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Becomes not ready, rejects new calls, and ends running calls after `grace_seconds`."""
        await self.end_calls(grace_seconds)
        if self._health_server is not None:
            await self._health_server.stop(0)
        if self._beating is not None:
            self._beating.cancel()

    async def _stop(self, grace_seconds: float) -> None:
        if self._local is None:
            await self._server.stop(grace_seconds)
        else:
            await asyncio.gather(self._server.stop(grace_seconds), self._local.stop(grace_seconds))


class _StreamHandlers:
    """Replaces the server in a call of a generated `register`, and adds the handlers of
    bidirectional streams to a LocalServer.
    """

    def __init__(self, local: LocalServer, tls: Tls | None) -> None:
        self._local = local
        self._check_caller = _allow if tls is None else tls.check_caller

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Ignores these handlers, since `add_registered_method_handlers` also receives them."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            if handler.stream_stream is not None:
                method = f"/{service}/{name}"
                self._local.handlers[method] = _with_statuses(handler, method, self._check_caller)


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    state = health_pb2.HealthCheckResponse.ServingStatus
    return state.SERVING if serving else state.NOT_SERVING


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """Binds an address and returns its port. Raises Unavailable, also if another process listens at
    the Unix socket, since grpc would remove the socket.
    """
    if is_unix_address(address):
        path = Path(unix_path(address))
        remove_abandoned(path)
        if path.is_socket():
            raise errors.Unavailable(f"cannot listen on {address}: another process listens there")
    try:
        if tls is None or is_unix_address(address):
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise errors.Unavailable(f"cannot listen on {address}: {_why_not(address)}") from error


def _listen(local: LocalServer, path: str) -> None:
    try:
        local.start(path)
    except OSError as error:
        raise errors.Unavailable(f"cannot listen on unix:{path}: {error}") from error


def _why_not(address: str) -> str:
    """Finds the reason why an address cannot be bound, which grpc's error does not have."""
    try:
        if is_unix_address(address):
            Path(unix_path(address)).parent.lstat()
        else:
            host, port = split_host_port(address)
            family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(where)
    except OSError as error:
        return str(error.strerror)
    return "the system does not say why"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Converts a StepwellError of any handler to its status, and any other error to INTERNAL.

    It also rejects callers that `tls` does not allow, and messages that cannot be decoded, for
    which grpc would report a defect of the server. Streaming handlers are async generators, or
    coroutines that write their responses. Cancellation is not converted. A method's handler is
    created at the method's first call and cached, so later calls do not invoke the interceptors
    after this one.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._check_caller = _allow if tls is None else tls.check_caller
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            handler = self._handlers[method] = _with_statuses(handler, method, self._check_caller)
        return handler


def _allow(_: Context) -> None:
    """Checks no caller, for a server without TLS."""


def _with_statuses(handler: Any, method: str, check: Check) -> Any:
    watch = handler.unary_stream if method.startswith(f"/{health.SERVICE_NAME}/") else None
    if watch is not None and not isasyncgenfunction(watch):
        return handler  # grpc's own handler, which raises no StepwellError
    if handler.request_deserializer is not None:
        read = _raising if handler.request_streaming else _returning
        handler = handler._replace(request_deserializer=read(handler.request_deserializer, method))
    wraps = {"unary_unary": _answering, "unary_stream": _streaming, "stream_stream": _streaming}
    for kind, wrap in wraps.items():
        if (behavior := getattr(handler, kind)) is not None:
            return handler._replace(**{kind: wrap(behavior, method, check)})
    return handler


def _raising(deserialize: Any, method: str) -> Any:
    """A deserializer for streams. Its errors are raised where the handler reads the message."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            problem = f"a message to {method} cannot be decoded"
            raise errors.InvalidArgument(problem, reason=status.UNDECODABLE) from error

    return read


def _returning(deserialize: Any, method: str) -> Any:
    """A deserializer for a single request. grpc calls it before the handler, so it must not raise:
    it returns its error instead of the request.
    """
    read = _raising(deserialize, method)

    def read_or_error(data: bytes) -> Any:
        try:
            return read(data)
        except errors.InvalidArgument as error:
            return error

    return read_or_error


def _decoded(request: Any) -> Any:
    """Returns the request, or raises the error that `_returning` returned instead."""
    if isinstance(request, errors.InvalidArgument):
        raise request
    return request


def _answering(behavior: Any, method: str, check: Check) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            check(context)
            return await behavior(_decoded(request), context)
        except Exception as error:
            return await _abort(context, error, method)

    return call


def _streaming(behavior: Any, method: str, check: Check) -> Any:
    async def generate(request: Any, context: Context) -> Any:
        try:
            check(context)
            async with aclosing(behavior(_decoded(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error, method)

    return generate if isasyncgenfunction(behavior) else _answering(behavior, method, check)


async def _abort(context: Context, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError) or context.cancelled():
        raise error
    if not isinstance(error, errors.StepwellError):
        logger.exception("defect while serving %s", method)
        error = errors.InternalError(f"a defect of the service in {method}: {type(error).__name__}")
    # `abort_with_status` would drop all trailing metadata except the details.
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata(error))
    code, message = status.status_code(error), status.sent_message(error)
    await context.abort(code, message, trailing_metadata=trailing)
