"""A client channel that reconnects when its certificate changes or its connection seems broken."""

import asyncio
from collections.abc import Callable

import grpc

from services.common.rpc.forwarding_channel import ForwardingChannel

_MOST_TIMEOUTS = 2


class RenewingChannel(ForwardingChannel):
    """A channel whose new calls use the current certificate and a working connection.

    A grpc channel keeps the certificate with which it was created. It also keeps its connection
    while the connection seems intact. This class creates a new channel for the next call after a
    change of the certificate, after `renew`, or after two consecutive calls that timed out. Running
    calls continue on the old channel, which is closed when the last of these calls has ended.
    """

    def __init__(
        self, connect: Callable[[], grpc.aio.Channel], certificate: Callable[[], object]
    ) -> None:
        """`connect` creates a channel with a new connection and the current certificate.
        `certificate` returns another object after the certificate has changed.
        """
        self._connect = connect
        self._certificate_of_now = certificate
        self._is_closed = False
        self._num_timeouts = 0
        # The number of running calls on each open channel.
        self._num_calls: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> grpc.aio.Channel:
        self._certificate = self._certificate_of_now()
        self._num_timeouts = 0
        self._channel: grpc.aio.Channel | None = self._connect()
        self._num_calls[self._channel] = 0
        return self._channel

    def current(self) -> grpc.aio.Channel:
        is_old = self._certificate is not self._certificate_of_now()
        if is_old or self._num_timeouts >= _MOST_TIMEOUTS:
            self.renew()
        return self._channel or self._open()

    def renew(self) -> None:
        old = self._channel
        if old is not None and not self._is_closed:
            self._channel = None
            self._close_if_unused(old)

    def ended(self, code: grpc.StatusCode) -> None:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._num_timeouts += 1
        elif code is grpc.StatusCode.OK:
            self._num_timeouts = 0

    def began(self, call: grpc.aio.Call) -> None:
        channel = self._channel
        assert channel is not None, "the call has just begun on it"
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
        """Ends all calls after `grace` seconds, or at once if `grace` is None."""
        self.current()
        self._is_closed = True
        channels = list(self._num_calls)
        self._num_calls.clear()
        await asyncio.gather(*self._closing, *(channel.close(grace) for channel in channels))
