"""The client side of a stream over a Unix socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from services.common.rpc.forwarding_channel import UNDECODABLE, UndecodableAnswer, lenient
from services.common.rpc.local_stream import FrameKind, LocalStream, opening, too_large
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES
from services.common.rpc.status import DETAILS_KEY

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOST = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="Socket closed")
_UNREADABLE = status_pb2.Status(code=code_pb2.UNKNOWN, message="the status cannot be decoded")
_CANCELLED = status_pb2.Status(code=code_pb2.CANCELLED, message="Locally cancelled")


class LocalCall:
    """A call with streams in both directions. It has the parts of `grpc.aio.StreamStreamCall` that
    services use, with the same errors. One task may read and one task may write.
    """

    def __init__(
        self,
        connection: socket.socket,
        method: str,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
        lookahead_bytes: int,
        max_sent_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Without `serialize` and `deserialize`, messages are bytes, as in grpc. A message that is
        sent has at most `max_sent_bytes` bytes.
        """
        self._method = method
        self._max_sent_bytes = max_sent_bytes
        self._serialize = serialize or bytes
        self._deserialize = lenient(deserialize) or bytes
        self.ended: asyncio.Future[status_pb2.Status] = asyncio.get_running_loop().create_future()
        """The status of the call. Pending until the call has ended."""
        self._stream = LocalStream(connection, lookahead_bytes, self._take, self._lost)
        self._stream.send(FrameKind.OPEN, opening(method, lookahead_bytes))

    async def write(self, request: Any) -> None:
        """Sends a message. Raises InvalidStateError if the call has ended. A message that is too
        large ends the call and raises AioRpcError. A cancelled write cancels the call.
        """
        if self.ended.done():
            raise asyncio.InvalidStateError("the call has ended")
        message = self._serialize(request)
        if len(message) > self._max_sent_bytes:
            status = too_large(self._max_sent_bytes)
            self._end(status)
            raise _error(status)
        self._stream.send(FrameKind.MESSAGE, message)
        if self._stream.has_unsent:
            try:
                await self._stream.drained()
            except asyncio.CancelledError:
                self.cancel()
                raise

    async def done_writing(self) -> None:
        """Notifies the server that no further message follows."""
        self._stream.send(FrameKind.END)

    async def read(self) -> Any:
        """Returns the next message, or EOF at the end. Raises AioRpcError if the call ends with an
        error, and CancelledError if the call was cancelled. A cancelled read cancels the call,
        since the message that it was to return is lost.
        """
        try:
            return await self._read()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def for_each(self, take: Callable[[Any], None]) -> None:
        """Calls `take` with each message, in the event loop callback that receives the message.
        Returns at the end of the call. Raises the errors that `read` raises. Also raises the first
        error of `take`, after which `take` is not called again.
        """
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(data: bytes) -> None:
            if not failed.done():
                try:
                    take(self._decoded(data))
                except Exception as error:
                    failed.set_exception(error)

        try:
            self._stream.receive(receive)
            await asyncio.wait((failed, self.ended), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            await self._read()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _decoded(self, data: bytes) -> Any:
        """Decodes a message. If this fails, cancels the call and raises UndecodableAnswer."""
        message = self._deserialize(data)
        if message is UNDECODABLE:
            self.cancel()
            raise UndecodableAnswer(self._method)
        return message

    async def _read(self) -> Any:
        data = None if self.cancelled() else await self._stream.read()
        if data is not None:
            return self._decoded(data)
        status = await asyncio.shield(self.ended)
        if status is _CANCELLED:
            raise asyncio.CancelledError
        if status.code:
            raise _error(status)
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """Cancels the call. Returns False if it had already ended."""
        has_run = not self.ended.done()
        self._end(_CANCELLED)
        return has_run

    def cancelled(self) -> bool:
        return self.ended.done() and self.ended.result() is _CANCELLED

    def add_done_callback(self, callback: Callable[["LocalCall"], object]) -> None:
        """Makes the event loop call `callback` with this call when the call has ended."""
        self.ended.add_done_callback(lambda _: callback(self))

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return _trailing_metadata(await asyncio.shield(self.ended))

    async def code(self) -> grpc.StatusCode:
        return _code(await asyncio.shield(self.ended))

    async def details(self) -> str:
        return str((await asyncio.shield(self.ended)).message)

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.STATUS:
            try:
                status = status_pb2.Status.FromString(payload)
            except DecodeError:
                status = _UNREADABLE
            self._end(status)

    def _lost(self) -> None:
        self._end(_LOST)

    def _end(self, status: status_pb2.Status) -> None:
        if not self.ended.done():
            self.ended.set_result(status)
        self._stream.close()


async def for_each(call: Any, take: Callable[[Any], None]) -> None:
    """Calls `take` with each message of a LocalCall or of a gRPC call. Returns at the end of the
    call. Raises the call's error, or an error of `take`.
    """
    if isinstance(call, LocalCall):
        await call.for_each(take)
    else:
        async for message in call:
            take(message)


def _code(status: status_pb2.Status) -> grpc.StatusCode:
    return _CODES.get(status.code, grpc.StatusCode.UNKNOWN)


def _error(status: status_pb2.Status) -> grpc.aio.AioRpcError:
    metadata = _trailing_metadata(status)
    return grpc.aio.AioRpcError(_code(status), grpc.aio.Metadata(), metadata, status.message)


def _trailing_metadata(status: status_pb2.Status) -> grpc.aio.Metadata:
    if not status.details:
        return grpc.aio.Metadata()
    return grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
