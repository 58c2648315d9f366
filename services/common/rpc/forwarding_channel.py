"""A client channel that forwards calls to another grpc channel."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc

UNDECODABLE = object()
"""Replaces a message that cannot be decoded."""
_STATUS_SECONDS = 1.0
"""How long a failed write waits for the status with which its call ends."""


def lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wraps a deserializer so that it returns UNDECODABLE instead of raising an error. For errors,
    grpc.aio would log a traceback and use None as the message.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, TypeError):  # TypeError: the call has ended without a message
            return UNDECODABLE

    return read


class UndecodableAnswer(grpc.aio.AioRpcError):
    """A message from the server cannot be decoded. The error's status is INTERNAL."""

    def __init__(self, method: str) -> None:
        details = f"a message of {method} cannot be decoded"
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, details)


class CheckedCall:
    """Wraps a grpc call. An undecodable message cancels the call and raises AioRpcError."""

    def __init__(
        self,
        call: Any,
        method: str,
        serialize: Callable[[Any], bytes],
        on_end: Callable[[grpc.StatusCode], None],
    ) -> None:
        """`on_end` is called with the status of a call that has a single response."""
        self._call = call
        self._method = method
        self._serialize = serialize
        self._on_end = on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            message = yield from self._call.__await__()
        except grpc.aio.AioRpcError as error:
            self._on_end(error.code())
            raise
        self._on_end(grpc.StatusCode.OK)
        return self._checked(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._call:
            if message is UNDECODABLE:
                self._fail()
            yield message

    def add_done_callback(self, callback: Callable[["CheckedCall"], object]) -> None:
        """Makes the event loop call `callback` with this call when the call has ended."""
        self._call.add_done_callback(lambda _: callback(self))

    async def read(self) -> Any:
        return self._checked(await self._call.read())

    async def write(self, request: Any) -> None:
        """Sends a message. Raises AioRpcError or InvalidStateError if the call has ended. The call
        then has the status that the peer sent. grpc.aio's own `write` (1.85) loses the peer's
        status and sets INTERNAL instead, if it fails before it has read the peer's status.
        """
        call = self._call
        await call.wait_for_connection()
        if call.done():
            raise asyncio.InvalidStateError("the call has ended")
        try:
            await call._cython_call.send_serialized_message(self._serialize(request))
        except cygrpc.InternalError as error:
            with suppress(TimeoutError):
                await asyncio.wait_for(call.code(), _STATUS_SECONDS)
            raise asyncio.InvalidStateError("the call has ended") from error
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _checked(self, message: Any) -> Any:
        if message is UNDECODABLE:
            self._fail()
        return message

    def _fail(self) -> None:
        self._call.cancel()
        raise UndecodableAnswer(self._method)


class ForwardingChannel(grpc.aio.Channel):
    """Forwards each call to an underlying channel and returns it as a CheckedCall."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """The underlying channel that the next call will use."""

    @abstractmethod
    def renew(self) -> None:
        """Makes the next call use a new connection, because a broken connection may seem intact
        while its packets are lost. Running calls continue on the old connection. Without running
        calls, the old connection is closed at once, and grpc stops its attempts to establish it.
        """

    def began(self, call: grpc.aio.Call) -> None:
        """This method is called with each call that starts on the current channel."""

    def ended(self, code: grpc.StatusCode) -> None:
        """This method is called with the status of each call that has a single response."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", *args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", *args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", *args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", *args, **kwargs)


class _Method:
    """A method of a stub. Each call uses the channel that is current when the call starts."""

    def __init__(
        self,
        channel: ForwardingChannel,
        kind: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._channel = channel
        self._kind, self._name, self._kwargs = kind, method, kwargs
        self._serialize = request_serializer or bytes
        self._args = (request_serializer, lenient(response_deserializer), *args)
        self._bound_to: grpc.aio.Channel | None = None
        self._method: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._channel.current()
        if channel is not self._bound_to:
            self._method = getattr(channel, self._kind)(self._name, *self._args, **self._kwargs)
            self._bound_to = channel
        call = self._method(*args, **kwargs)
        self._channel.began(call)
        return CheckedCall(call, self._name, self._serialize, self._channel.ended)
