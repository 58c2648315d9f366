"""A grpc.aio server as every service runs it: health, reflection, statuses, keepalive, drain."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import isasyncgenfunction
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from services.common import errors, status
from services.common.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

LIVENESS = ""
"""The name of liveness in grpc.health.v1: if it is not SERVING, the process is to be replaced."""
READINESS = "ready"
"""The name of readiness in grpc.health.v1: if it is SERVING, requests can be served now."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share its connections silently; the second must fail.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    # The shortest interval between pings of a client without traffic. After two shorter ones the
    # server ends the connection ("Too many pings"). grpc's default is five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
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
    ) -> None:
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(), *interceptors],
            options=tuple((dict(SERVER_OPTIONS) | dict(options or {})).items()),
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self._draining = False

    def add(
        self, register: Callable[[Any, grpc.aio.Server], None], servicer: Any, name: str
    ) -> None:
        """Serves `servicer` through its generated `register`; `name` is the full service name."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self, address: str) -> str:
        """Binds and serves, live but not ready until `set_ready`; returns the bound address.

        `address` is host:port, with port 0 for a free one, or unix:PATH. Raises Unavailable.
        """
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self.set_live(True)
        await self.set_ready(False)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise errors.Unavailable(f"cannot listen on {address}: {_why_not(address)}") from error
        await self._server.start()
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def set_ready(self, ready: bool) -> None:
        """Sets readiness. Not ready once `drain` has begun, for any `ready`."""
        for name in (READINESS, *self._names):
            await self._health.set(name, _status(ready and not self._draining))

    async def set_live(self, live: bool) -> None:
        """Sets liveness; a supervisor replaces a process that is not live."""
        await self._health.set(LIVENESS, _status(live))

    async def drain(self, grace_seconds: float) -> None:
        """Sets not ready, refuses new calls, and ends running ones after `grace_seconds`."""
        self._draining = True
        await self.set_ready(False)
        await self._server.stop(grace_seconds)


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    state = health_pb2.HealthCheckResponse.ServingStatus
    return state.SERVING if serving else state.NOT_SERVING


def _why_not(address: str) -> str:
    """The likely reason why an address cannot be bound."""
    if address.startswith("unix:") and not Path(address.removeprefix("unix:")).parent.is_dir():
        return "there is no such directory"
    return "it is taken, or no address of this machine"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns a StepwellError of any handler into its status; anything else into INTERNAL.

    Streaming handlers are async generators, or coroutines that write their responses. Cancellation
    passes through. A method's handler is made once, at its first call, which is also the only one
    for which the interceptors after this one are asked.
    """

    def __init__(self) -> None:
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
            handler = self._handlers[method] = _with_statuses(handler, method)
        return handler


def _with_statuses(handler: Any, method: str) -> Any:
    """The handler, a named tuple of grpc's, with our errors made statuses."""
    if handler.unary_unary is not None:
        return handler._replace(unary_unary=_answering(handler.unary_unary, method))
    if handler.unary_stream is not None and not _is_health_watch(handler, method):
        return handler._replace(unary_stream=_streaming(handler.unary_stream, method))
    if handler.stream_stream is not None:
        return handler._replace(stream_stream=_streaming(handler.stream_stream, method))
    return handler


def _is_health_watch(handler: Any, method: str) -> bool:
    """Whether it is grpc's own handler, which raises none of our errors."""
    is_health = method.startswith(f"/{health.SERVICE_NAME}/")
    return is_health and not isasyncgenfunction(handler.unary_stream)


def _answering(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            return await _abort(context, error, method)

    return call


def _streaming(behavior: Any, method: str) -> Any:
    async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error, method)

    return generate if isasyncgenfunction(behavior) else _answering(behavior, method)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    if isinstance(error, grpc.aio.AbortError) or context.cancelled():
        raise error
    if not isinstance(error, errors.StepwellError):
        logger.exception("defect while serving %s", method)
        error = errors.InternalError(f"a defect in {method}: {type(error).__name__}")
    await context.abort_with_status(rpc_status.to_status(status.to_rich_status(error)))
