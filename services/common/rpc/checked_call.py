from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

UNDECODABLE = object()
"""Replaces a message that cannot be decoded."""


def lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wraps a deserializer so that it returns UNDECODABLE instead of raising an error. If a
    deserializer raises an error, grpc.aio logs its traceback and uses None as the message.
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
    """The error, with status INTERNAL, of a call whose answer cannot be decoded."""

    def __init__(self, method: str) -> None:
        details = f"a message of {method} cannot be decoded"
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, details)


class CheckedCall:
    """Wraps a grpc call. An undecodable message cancels it and raises AioRpcError."""

    def __init__(self, call: Any, method: str, on_end: Callable[[grpc.StatusCode], None]) -> None:
        """`on_end` is called with the status of a call that has a single answer."""
        self._call = call
        self._method = method
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

    def _checked(self, message: Any) -> Any:
        if message is UNDECODABLE:
            self._fail()
        return message

    def _fail(self) -> None:
        self._call.cancel()
        raise UndecodableAnswer(self._method)
