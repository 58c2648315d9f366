"""Sends each gRPC call to the servicer of the model that its first message names."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue
from stepwell.gateway.v1 import gateway_pb2_grpc

from services.common.errors import Aborted
from services.common.rpc.server import Context
from services.gateway.adapters.access import Access
from services.gateway.adapters.grpc.call_records import metadata_of
from services.gateway.adapters.grpc.inference_servicer import (
    METHOD_PREFIX,
    REQUEST_TYPES,
    STREAM_TYPES,
    InferenceServicer,
)
from services.gateway.adapters.grpc.proto_meter import MessageReaders
from services.gateway.adapters.grpc.request_interceptor import RequestInterceptor, authorization_in
from services.gateway.core.request.inference import Inference

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_LIST_MODELS = f"{METHOD_PREFIX}ListModels"
_BY_MODEL = (REQUEST_TYPES.keys() | STREAM_TYPES.keys()) - {_LIST_MODELS}


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """What serves the calls of one model."""

    inference: Inference
    interceptor: RequestInterceptor
    servicer: InferenceServicer
    _handlers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        register: Callable[[Any, Any], None] = gateway_pb2_grpc.add_InferenceServicer_to_server
        register(self.servicer, _Handlers(self._handlers))

    async def handler(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a call, with the checks of the interceptor."""

        async def own(details: grpc.HandlerCallDetails) -> Any:
            return self._handlers[details.method]

        return await self.interceptor.intercept_service(own, details)


class GrpcByModel(grpc.aio.ServerInterceptor):
    """Reads a call's first message and forwards the call to the model or adapter that it names.
    Calls with an unknown name, which are refused, and calls without a name belong to the first
    model.
    """

    def __init__(
        self, models: Sequence[ModelCalls], access: Access, message_timeout_seconds: float
    ) -> None:
        """Only messages of callers that `access` accepts are read."""
        self._models = models
        self._access = access
        self._timeout_seconds = message_timeout_seconds
        self._readers = MessageReaders(message_timeout_seconds)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        first = self._models[0]
        if handler_call_details.method not in _BY_MODEL:
            return await first.interceptor.intercept_service(continuation, handler_call_details)
        handlers = [await model.handler(handler_call_details) for model in self._models]
        is_turn = handler_call_details.method in STREAM_TYPES

        async def serve(messages: AsyncIterator[bytes], context: Context) -> None:
            await self._access.authenticate(authorization_in(metadata_of(context)))
            raw = await (self._first_turn if is_turn else self._readers.read)(messages)
            turn = _first_field(raw or b"") if is_turn else raw
            name = _first_field(turn or b"").decode(errors="replace")
            named = (n for n, one in enumerate(self._models) if name in one.inference.names())
            handler = handlers[next(named, 0)]
            await handler.stream_stream(_again(raw, messages), context)

        return grpc.stream_stream_rpc_method_handler(serve, None, handlers[0].response_serializer)

    async def _first_turn(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """Reads a session's first message, which opens the session at its model. Until then no
        limit on sessions applies to the stream, so the message must arrive in time.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await anext(messages, None)
        except TimeoutError:
            raise Aborted(
                "the session's first turn did not arrive within the time limit",
                reason="MESSAGE_TOO_SLOW",
            ) from None


class _Handlers:
    """Replaces the server in a call of the generated function, and stores the methods' handlers."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Ignores these handlers, since `add_registered_method_handlers` also receives them."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def _first_field(raw: bytes) -> bytes:
    """Returns the field 1 of a serialized message, which is a text, bytes or a message. In all
    requests of a model, field 1 is its name. Empty if the field is missing or the message invalid.
    """
    try:
        return BytesValue.FromString(raw).value
    except DecodeError:
        return b""


async def _again(first: bytes | None, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first is None:
        return
    yield first
    async for message in messages:
        yield message
