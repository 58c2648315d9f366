"""A grpc.aio server as every service runs it: health, reflection, statuses, keepalive, drain."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isasyncgenfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import errors
from services.common.process.health_file import HealthFile
from services.common.rpc import status
from services.common.rpc.addresses import is_unix_address, split_host_port, unix_path
from services.common.rpc.channel import KEEPALIVE_OPTIONS
from services.common.rpc.local_server import LocalServer
from services.common.rpc.local_stream import streams_path
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES
from services.common.rpc.unix_socket import remove_abandoned

if TYPE_CHECKING:
    from services.common.tls.credentials import Tls

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[Context], None]

logger = logging.getLogger(__name__)

LIVENESS = ""
"""The name of liveness in grpc.health.v1: if it is not SERVING, the process is to be replaced."""
READINESS = "ready"
"""The name of readiness in grpc.health.v1: if it is SERVING, requests can be served now."""
_MAX_HEALTH_RPCS = 64
"""Calls that are served at once on an address for health alone."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share its connections silently; the second must fail.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    # The shortest interval between pings of a client without traffic. After two shorter ones the
    # server ends the connection ("Too many pings"). grpc's default is five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # How long a client may take for the handshake of TLS, and to begin with HTTP/2.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Otherwise the window grows to megabytes, which a stream that is not read takes up.
    ("grpc.http2.bdp_probe", 0),
)


class GrpcServer:
    """Services behind one port. Add them, start, and at the end drain.

    Health answers for liveness under the name "", and for readiness under "ready" and the name of
    each service. `max_concurrent_rpcs` bounds accepted calls, long streams included; further ones
    are refused with RESOURCE_EXHAUSTED. `options` extend or replace SERVER_OPTIONS; handlers that
    `interceptors` return may raise our errors.
    """

    def __init__(
        self,
        *,
        max_concurrent_rpcs: int | None = None,
        options: Mapping[str, int] | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: "Tls | None" = None,
        has_local_streams: bool = False,
    ) -> None:
        """With `tls`, clients that come over the network use it, and only those that it allows are
        served. With `has_local_streams` a server that listens at unix:PATH also takes calls with
        streams both ways at PATH.streams, past `interceptors`: see `LocalStream`.
        """
        self._tls = tls
        self._local = LocalServer(max_concurrent_rpcs) if has_local_streams else None
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(tls), *interceptors],
            options=tuple((dict(SERVER_OPTIONS) | dict(options or {})).items()),
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
        """Serves `servicer` through its generated `register`; `name` is the full service name."""
        register(servicer, self._server)
        self._names.append(name)
        if self._local is not None:
            register(servicer, _StreamHandlers(self._local, self._tls))

    async def start(
        self, address: str, health_address: str | None = None, health_file: Path | None = None
    ) -> str:
        """Binds and serves, live but not ready until `set_ready`; returns the bound address.

        `address` is host:port, with port 0 for a free one, or unix:PATH. At `health_address`
        nothing but health is served, without TLS, and `health_file` says the same: see
        `HealthFile`. Raises Unavailable.
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
        """Sets readiness. Not ready once `drain` has begun, for any `ready`."""
        if self._health_file is not None:
            self._health_file.set_ready(ready and not self._draining)
        for name in (READINESS, *self._names):
            await self._health.set(name, _status(ready and not self._draining))

    async def set_live(self, live: bool) -> None:
        """Sets liveness; a supervisor replaces a process that is not live."""
        if self._health_file is not None:
            self._health_file.set_live(live)
        await self._health.set(LIVENESS, _status(live))

    def begin_drain(self, grace_seconds: float) -> None:
        """Refuses new calls, and tells clients to connect elsewhere, while health goes on being
        served at its own address. To be followed by `drain`.
        """
        self._stopping = asyncio.create_task(self._stop(grace_seconds))

    async def end_calls(self, grace_seconds: float) -> None:
        """As `drain`, while health goes on being served at its own address."""
        self._draining = True
        await self.set_ready(False)
        await self._stop(grace_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Sets not ready, refuses new calls, and ends running ones after `grace_seconds`."""
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
    """Stands where a generated `register` expects a server: takes the handlers of methods with
    streams both ways.
    """

    def __init__(self, local: LocalServer, tls: "Tls | None") -> None:
        self._local = local
        self._check_caller = _allow if tls is None else tls.check_caller

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """The same methods as `add_registered_method_handlers` gets."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            if handler.stream_stream is not None:
                method = f"/{service}/{name}"
                self._local.handlers[method] = _with_statuses(handler, method, self._check_caller)


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    state = health_pb2.HealthCheckResponse.ServingStatus
    return state.SERVING if serving else state.NOT_SERVING


def _bind(server: grpc.aio.Server, address: str, tls: "Tls | None") -> int:
    """Returns the port. Raises Unavailable, also where another process listens at a Unix socket,
    which grpc would remove.
    """
    if is_unix_address(address):
        path = Path(unix_path(address))
        remove_abandoned(path)
        if path.is_socket():
            raise errors.Unavailable(f"cannot listen on {address}: another process does")
    try:
        if tls is None or is_unix_address(address):
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise errors.Unavailable(f"cannot listen on {address}: {_why_not(address)}") from error


def _listen(local: LocalServer, path: str) -> None:
    """Raises Unavailable."""
    try:
        local.start(path)
    except OSError as error:
        raise errors.Unavailable(f"cannot listen on unix:{path}: {error}") from error


def _why_not(address: str) -> str:
    """The system's reason why an address cannot be bound, which grpc only logs."""
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
    """Turns a StepwellError of any handler into its status; anything else into INTERNAL. Before,
    callers are refused that `tls` does not allow, and messages that cannot be decoded, which grpc
    would take for a defect of the server.

    Streaming handlers are async generators, or coroutines that write their responses. Cancellation
    passes through. A method's handler is made once, at its first call, which is also the only one
    for which the interceptors after this one are asked.
    """

    def __init__(self, tls: "Tls | None" = None) -> None:
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
    """The check of callers of a server that takes all calls."""


def _with_statuses(handler: Any, method: str, check: Check) -> Any:
    """The handler, a named tuple of grpc's, with our errors made statuses."""
    if _is_health_watch(handler, method):
        return handler
    if handler.request_deserializer is not None:
        read = _raising if handler.request_streaming else _returning
        handler = handler._replace(request_deserializer=read(handler.request_deserializer, method))
    if handler.unary_unary is not None:
        return handler._replace(unary_unary=_answering(handler.unary_unary, method, check))
    if handler.unary_stream is not None:
        return handler._replace(unary_stream=_streaming(handler.unary_stream, method, check))
    if handler.stream_stream is not None:
        return handler._replace(stream_stream=_streaming(handler.stream_stream, method, check))
    return handler


def _raising(deserialize: Any, method: str) -> Any:
    """A deserializer of a stream's messages, whose errors come up where the handler reads them."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            problem = f"a message to {method} cannot be decoded"
            raise errors.InvalidArgument(problem, reason=status.UNDECODABLE) from error

    return read


def _returning(deserialize: Any, method: str) -> Any:
    """A deserializer of a call's one message, which grpc reads before the handler is called: the
    error stands in the message's place.
    """
    read = _raising(deserialize, method)

    def read_or_error(data: bytes) -> Any:
        try:
            return read(data)
        except errors.InvalidArgument as error:
            return error

    return read_or_error


def _is_health_watch(handler: Any, method: str) -> bool:
    """Whether it is grpc's own handler, which raises none of our errors."""
    if handler.unary_stream is None or not method.startswith(f"/{health.SERVICE_NAME}/"):
        return False
    return not isasyncgenfunction(handler.unary_stream)


def _decoded(request: Any) -> Any:
    """The message. Raises the error that stands in its place."""
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
        error = errors.InternalError(f"a defect in {method}: {type(error).__name__}")
    # `abort_with_status` would drop what is in the trailing metadata besides the details.
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata(error))
    await context.abort(status.status_code(error), error.message, trailing_metadata=trailing)
