"""A client channel over TLS that goes on with each new certificate."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from services.common.forwarding_channel import ForwardingChannel
from services.common.tls import Tls, channel_credentials


class RenewingChannel(ForwardingChannel):
    """A channel whose new calls use the current certificate.

    A channel of grpc's keeps the certificate that it was made with. This one makes another when a
    call begins after a change; calls that run go on, on the connection they have, which is closed
    when the last of them has ended.
    """

    def __init__(self, address: str, tls: Tls, options: Sequence[tuple[str, Any]]) -> None:
        self._address = address
        self._tls = tls
        self._options = (*options, *tls.channel_options())
        self._is_closed = False
        # The number of calls that run on each channel that is not closed.
        self._num_calls: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._certificate = self._tls.watch.current
        self._channel = grpc.aio.secure_channel(
            self._address, channel_credentials(self._certificate), options=self._options
        )
        self._num_calls[self._channel] = 0

    def current(self) -> grpc.aio.Channel:
        if self._certificate is not self._tls.watch.current and not self._is_closed:
            old = self._channel
            self._open()
            self._close_if_unused(old)
        return self._channel

    def began(self, call: grpc.aio.Call) -> None:
        """A call has begun on the current channel."""
        channel = self._channel
        self._num_calls[channel] += 1
        call.add_done_callback(lambda _: self._ended(channel))

    def _ended(self, channel: grpc.aio.Channel) -> None:
        if channel in self._num_calls:
            self._num_calls[channel] -= 1
            self._close_if_unused(channel)

    def _close_if_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._num_calls[channel]:
            del self._num_calls[channel]
            task = asyncio.create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, after `grace`."""
        self._is_closed = True
        channels = list(self._num_calls)
        self._num_calls.clear()
        await asyncio.gather(*self._closing, *(channel.close(grace) for channel in channels))

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)


class _Method:
    """A method of a stub, which is called on the channel of the moment."""

    def __init__(
        self, channel: RenewingChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind, self._args, self._kwargs = kind, args, kwargs
        self._bound_to: grpc.aio.Channel | None = None
        self._method: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._channel.current()
        if channel is not self._bound_to:
            self._method = getattr(channel, self._kind)(*self._args, **self._kwargs)
            self._bound_to = channel
        call = self._method(*args, **kwargs)
        self._channel.began(call)
        return call
