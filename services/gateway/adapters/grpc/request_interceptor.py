"""Authenticates gRPC calls before their messages are read, and limits the size of a message and the
time in which it must arrive.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.rpc.server import Context
from services.gateway.adapters.access import CALLER
from services.gateway.adapters.grpc.call_records import CallRecords, metadata_of
from services.gateway.adapters.grpc.proto_meter import MessageReaders, check_message
from services.gateway.adapters.telemetry.request_record import CALL_ARRIVAL, CALL_RECORD
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder
from services.gateway.core.caller import Caller
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.traces.timeline import Part
from services.gateway.options.option import Options

_HEALTH = "/grpc.health.v1.Health/"
_MAX_OTHER_STREAMS = 64


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates each call, sets the context variable CALLER, and then reads the request message
    itself, because grpc would read and parse the message before it calls a handler.

    The health service needs no API key. The number of concurrent health watches and calls of other
    services, such as reflection, is limited.
    """

    def __init__(
        self,
        options: Options,
        request_types: Mapping[str, type[Message]],
        stream_types: Mapping[str, type[Message]],
        *,
        arriving: Mapping[str, Callable[[Context], Arrival]],
        operations: Mapping[str, str],
        recorder: RequestRecorder,
        max_items: int,
        message_timeout_seconds: float,
    ) -> None:
        """The keys of all mappings are full names of methods. `request_types` maps methods with a
        single request to the type of the request. `stream_types` maps methods with a request stream
        to the type of its messages.

        The method's function in `arriving` is called before the message is read. It counts the
        call, or raises an error to refuse it. The Arrival that it returns is the value of
        CALL_ARRIVAL during the call, and ends with the call. `operations` maps methods that run the
        model to the names of their operations in traces and metrics.
        """
        self._options = options
        self._request_types = request_types
        self._stream_types = stream_types
        self._arriving = arriving
        self._operations = operations
        self._records = CallRecords(recorder)
        self._max_items = max_items
        self._readers = MessageReaders(message_timeout_seconds)
        self._num_other_streams = 0
        self._handlers: dict[str, Any] = {}
        """Cached handlers of the methods whose messages the interceptor reads."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if (known := self._handlers.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or method == f"{_HEALTH}Check":
            return handler
        if method.startswith(_HEALTH):
            return grpc.unary_stream_rpc_method_handler(
                self._watch_health(handler),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if method in self._request_types:
            serve = self._serve_message(handler, method)
            deserializer = None
        elif method in self._stream_types:
            serve = self._serve_stream(handler, method)
            deserializer = None
        else:
            serve = self._serve_other(handler)
            deserializer = handler.request_deserializer
        served = grpc.stream_stream_rpc_method_handler(
            serve, deserializer, handler.response_serializer
        )
        if deserializer is None:
            self._handlers[method] = served
        return served

    def _serve_message(self, handler: Any, method: str) -> Any:
        kind = self._request_types[method]
        arriving, operation = self._arriving.get(method), self._operations.get(method, "")

        async def answer(messages: AsyncIterator[bytes], context: Context) -> None:
            record = CALL_RECORD.get()
            record.enter(Part.READ)
            raw = await self._readers.read(messages)
            record.enter(Part.PARSE)
            request = self._parse(raw, kind)
            if handler.unary_unary is not None:
                await context.write(await handler.unary_unary(request, context))
            else:
                await handler.unary_stream(request, context)

        async def serve(messages: AsyncIterator[bytes], context: Context) -> None:
            with self._records.recording(method, operation, context) as record:
                record.caller = await self._authenticate(record.headers)
                if arriving is None:
                    await answer(messages, context)
                    return
                async with self._options.admitted(record, context):
                    with arriving(context) as arrival:
                        CALL_ARRIVAL.set(arrival)
                        await answer(messages, context)

        return serve

    async def _authenticate(self, metadata: Mapping[str, str]) -> Caller:
        """Returns the caller of a call, and sets CALLER to it."""
        caller = await self._options.access.authenticate(authorization_in(metadata))
        CALLER.set(caller)
        return caller

    def _serve_stream(self, handler: Any, method: str) -> Any:
        """Serves calls with a request stream. Each message is checked before it is parsed."""
        kind = self._stream_types[method]

        async def serve(messages: AsyncIterator[bytes], context: Context) -> None:
            await self._authenticate(metadata_of(context))

            async def parsed() -> AsyncIterator[Message]:
                async for raw in messages:
                    yield self._parse(raw, kind)

            await handler.stream_stream(parsed(), context)

        return serve

    def _watch_health(self, handler: Any) -> Any:
        async def watch(request: Message, context: Context) -> None:
            try:
                with self._counted():
                    await handler.unary_stream(request, context)
            except ResourceExhausted as error:  # StatusInterceptor does not handle health calls.
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)

        return watch

    def _serve_other(self, handler: Any) -> Any:
        async def serve(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            await self._authenticate(metadata_of(context))
            with self._counted():
                async with aclosing(handler.stream_stream(messages, context)) as responses:
                    async for response in responses:
                        yield response

        return serve

    def _parse(self, raw: bytes, kind: type[Message]) -> Message:
        check_message(raw, kind, self._max_items)
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            raise InvalidArgument(f"the message is no {kind.DESCRIPTOR.name}") from error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_other_streams >= _MAX_OTHER_STREAMS:
            raise ResourceExhausted(
                f"{_MAX_OTHER_STREAMS} streams of this kind are open, the most at once; try again "
                "later",
                retry_after_seconds=1.0,
            )
        self._num_other_streams += 1
        try:
            yield
        finally:
            self._num_other_streams -= 1


def authorization_in(metadata: Mapping[str, str]) -> str:
    """Returns a call's `authorization`, decoded as ISO 8859-1, since `authenticate` expects one
    character for each byte.
    """
    value = metadata.get("authorization", "")
    return value.encode("utf-8", errors="surrogateescape").decode("latin-1")
