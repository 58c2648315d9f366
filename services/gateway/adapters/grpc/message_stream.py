"""Writes answers to gRPC streams, piece by piece."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
from google.protobuf.message import Message

from services.gateway.adapters.grpc.stream_reader_timeout import StreamReaderTimeout
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.observation import Observation
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


class MessageStream:
    """Writes one message for each non-empty piece of an answer. Pieces that arrive during a write
    are merged.
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


class AnswerStreams:
    """Streams answers to clients, and ends the streams of clients that stop reading."""

    def __init__(
        self, inference: Inference, metrics: Metrics, *, reader_timeout_seconds: float
    ) -> None:
        self._inference = inference
        self._metrics = metrics
        self._reader_timeout_seconds = reader_timeout_seconds

    async def send(
        self,
        generation: Generation,
        to_message: Callable[[Piece], Message],
        context: Context,
        record: RequestRecord,
        observation: Observation,
        arrival: Arrival,
        work: AsyncExitStack,
    ) -> None:
        """Runs a generation and writes its pieces. `work` is the stack of the call's contexts. If
        the client stops reading, the stack is closed with an error. `arrival` is ended just before
        the sequences are sent.
        """
        with StreamReaderTimeout(
            work, self._reader_timeout_seconds, self._reader_timed_out
        ) as reader:
            stream = MessageStream(to_message, context, reader, record)
            watched = work.enter_context(observation.watching(generation, stream, stream=True))
            delivery = self._inference.delivery(generation, watched, stream=True)
            work.callback(delivery.close)
            arrival.end()
            await delivery.run()

    def _reader_timed_out(self) -> None:
        self._metrics.reader_timed_out("grpc")
        logger.warning("a gRPC client stopped reading: its request is ended")
