"""An answer as the messages of a gRPC stream, written while its pieces come."""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from services.gateway.adapters.request_record import RequestRecord
from services.gateway.adapters.stream_reader_timeout import StreamReaderTimeout
from services.gateway.core.choice import Piece

Context = grpc.aio.ServicerContext[Any, Any]


class MessageStream:
    """A sink that writes a message for each piece that is not empty. Pieces that come while one is
    written are merged.
    """

    def __init__(
        self,
        to_message: Callable[[Piece], Message],
        context: Context,
        reader: StreamReaderTimeout,
        record: RequestRecord,
    ) -> None:
        self._to_message = to_message
        self._context = context
        self._reader = reader
        self._record = record
        self._unwritten: list[Piece] = []

    @property
    def is_ready(self) -> bool:
        return not self._unwritten

    def put(self, added: list[Piece]) -> None:
        self._unwritten += [piece for piece in added if not piece.is_empty]

    async def drain(self) -> None:
        """Writes the messages. Raises Aborted if the client has stopped reading."""
        for piece in self._unwritten:
            self._reader.sending()
            await self._context.write(self._to_message(piece))
            self._record.write_nanos += self._reader.sent()
        self._unwritten = []
