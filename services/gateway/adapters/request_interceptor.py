"""Checks gRPC calls before their message is read, and bounds how large and slow it may be."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from services.common.errors import InvalidArgument, ResourceExhausted
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.message_readers import MessageReaders
from services.gateway.adapters.proto_meter import check_message

_HEALTH = "/grpc.health.v1.Health/"
_MAX_OTHER_STREAMS = 64

Context = grpc.aio.ServicerContext[Any, Any]


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Checks the key of each call, and reads its message itself.

    grpc would read and parse a request's message before any code of ours sees the call. Health
    needs no key. Streams of other services, such as reflection, are bounded in number.
    """

    def __init__(
        self,
        keys: ApiKeys,
        request_types: Mapping[str, type[Message]],
        *,
        checks: Mapping[str, Callable[[Context], None]],
        max_items: int,
        message_timeout_seconds: float,
    ) -> None:
        """`request_types` has the message of each method, by its full name; `checks` what is called
        before that message is read, and raises to refuse the call.
        """
        self._keys = keys
        self._request_types = request_types
        self._checks = checks
        self._max_items = max_items
        self._readers = MessageReaders(message_timeout_seconds)
        self._num_other_streams = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method == f"{_HEALTH}Check":
            return handler
        if method.startswith(_HEALTH):
            return grpc.unary_stream_rpc_method_handler(
                self._watch_health(handler),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if method in self._request_types:
            check = self._checks.get(method)
            serve = self._serve_message(handler, check, self._request_types[method])
            deserializer = None
        else:
            serve = self._serve_other(handler)
            deserializer = handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(
            serve, deserializer, handler.response_serializer
        )

    def _serve_message(
        self, handler: Any, check: Callable[[Context], None] | None, kind: type[Message]
    ) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Context) -> None:
            self._keys.check(_authorization(context))
            if check is not None:
                check(context)
            request = self._parse(await self._readers.read(messages), kind)
            if handler.unary_unary is not None:
                await context.write(await handler.unary_unary(request, context))
            else:
                await handler.unary_stream(request, context)

        return serve

    def _watch_health(self, handler: Any) -> Any:
        async def watch(request: Message, context: Context) -> None:
            try:
                with self._counted():
                    await handler.unary_stream(request, context)
            except ResourceExhausted as error:  # this handler may not raise our errors
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)

        return watch

    def _serve_other(self, handler: Any) -> Any:
        async def serve(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            self._keys.check(_authorization(context))
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
                f"{_MAX_OTHER_STREAMS} such streams are open; no more are served at once",
                retry_after_seconds=1.0,
            )
        self._num_other_streams += 1
        try:
            yield
        finally:
            self._num_other_streams -= 1


def _authorization(context: Context) -> str:
    """The header's value, with a character for each byte, as HTTP's headers are given."""
    metadata = dict(context.invocation_metadata() or ())
    value = str(metadata.get("authorization", ""))
    return value.encode("utf-8", errors="surrogateescape").decode("latin-1")
