"""Calls whose answers are checked: one that cannot be decoded ends its call with an error."""

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

UNDECODABLE = object()
"""Stands in the place of a message that cannot be decoded."""


def lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns UNDECODABLE where the given one raises: grpc.aio would log the
    error with its traceback, and go on with None in the place of the message.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, TypeError):  # the latter where a call has ended without a message
            return UNDECODABLE

    return read


class UndecodableAnswer(grpc.aio.AioRpcError):
    """The error of a call with such an answer: INTERNAL, as of grpc in other languages."""

    def __init__(self, method: str) -> None:
        details = f"a message of {method} cannot be decoded"
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, details)


class CheckedCall:
    """A call of grpc's, and in everything like it, but that AioRpcError is raised in the place of a
    message that cannot be decoded, and the call cancelled.
    """

    def __init__(self, call: Any, method: str, on_end: Callable[[grpc.StatusCode], None]) -> None:
        """`on_end` gets the status of a call that is answered by one message."""
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
        """Has the loop call it, with this call, once the call has ended."""
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
