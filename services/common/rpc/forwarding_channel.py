from abc import abstractmethod
from typing import Any, Self

import grpc

from services.common.rpc.checked_call import CheckedCall, lenient


class ForwardingChannel(grpc.aio.Channel):
    """Forwards each call to an underlying channel and returns it as a CheckedCall."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """Returns the underlying channel for a new call."""

    @abstractmethod
    def renew(self) -> None:
        """Makes the next call use a new connection. A broken connection may seem intact while its
        packets are lost. Running calls continue on the old connection. If there are none, the old
        connection is closed at once, which also ends grpc's attempts to establish it.
        """

    def began(self, call: grpc.aio.Call) -> None:
        """Called with each call that starts on the current channel."""

    def ended(self, code: grpc.StatusCode) -> None:
        """Called with the status of each call that has a single answer."""

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
    """A method of a stub. Each call uses the channel that is current at that time."""

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
        return CheckedCall(call, self._name, self._channel.ended)
