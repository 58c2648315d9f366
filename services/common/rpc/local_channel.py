"""A client channel to a Unix socket, in which each bidirectional stream has its own connection."""

import asyncio
import socket
from typing import Any

import grpc

from services.common.rpc.forwarding_channel import ForwardingChannel
from services.common.rpc.local_call import LocalCall
from services.common.rpc.local_stream import streams_path

_TRANSIENT_FAILURE = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class LocalChannel(ForwardingChannel):
    """A channel to unix:PATH.

    A call with streams in both directions has its own connection to PATH.streams, which carries
    the messages without gRPC (see `LocalStream`). This requires that a server listens at
    PATH.streams, and that the call has no request iterator, timeout or metadata. All other calls
    use gRPC. If a server listens at PATH.streams, gRPC calls wait until gRPC has connected.
    Without this wait, gRPC calls would fail for up to a quarter of a second after a server's
    restart, while streams already work.
    """

    def __init__(
        self, channel: ForwardingChannel, path: str, lookahead_bytes: int, max_sent_bytes: int
    ) -> None:
        """`channel` is a gRPC channel to the same server."""
        self._channel = channel
        self._path = streams_path(path)
        self._lookahead_bytes = lookahead_bytes
        self._max_sent_bytes = max_sent_bytes
        self._calls: set[LocalCall] = set()

    def current(self) -> grpc.aio.Channel:
        return self._channel

    def renew(self) -> None:
        self._channel.renew()

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls after `grace` seconds, or at once if `grace` is None."""
        closing = asyncio.ensure_future(self._channel.close(grace))
        if self._calls and grace:
            await asyncio.wait([call.ended for call in self._calls], timeout=grace)
        for call in list(self._calls):
            call.cancel()
        await closing

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._waiting(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._waiting(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._waiting(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        over_grpc = self._channel.stream_stream(
            method, request_serializer, response_deserializer, *args, **kwargs
        )

        def begin(*args: Any, **kwargs: Any) -> Any:
            connection = None if args or kwargs else _connected(self._path)
            if connection is None:
                return over_grpc(*args, **kwargs)
            call = LocalCall(
                connection,
                method,
                request_serializer,
                response_deserializer,
                self._lookahead_bytes,
                self._max_sent_bytes,
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            return call

        return begin

    def _waiting(self, method: Any) -> Any:
        def begin(*args: Any, **kwargs: Any) -> Any:
            if self._channel.get_state() is _TRANSIENT_FAILURE and _is_there(self._path):
                kwargs = {"wait_for_ready": True} | kwargs
            return method(*args, **kwargs)

        return begin


def _is_there(path: str) -> bool:
    connection = _connected(path)
    if connection is None:
        return False
    connection.close()
    return True


def _connected(path: str) -> socket.socket | None:
    """Returns a non-blocking connection, or None if no server listens or no descriptor is free."""
    try:
        connection = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection
