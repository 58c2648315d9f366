"""Writes answers to gRPC streams, piece by piece. A generation is a request while it runs."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Self

from google.protobuf.message import Message

from services.common.errors import Aborted
from services.common.rpc.server import Context
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.observation import Observation
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference


class StreamReaderTimeout:
    """Ends a stream's request if the client reads no message for `timeout_seconds`.

    The object is a context manager for the duration of the stream. `sending` must be called before
    each write, and `sent` after it. They only set attributes, which a timer checks at intervals. On
    a timeout, `work`, the stack of the call's context managers, is closed at once with an error, so
    that the sequences are aborted and the request no longer counts as a concurrent request. The
    gRPC call itself cannot end during a write. If the client reads again, it receives the messages
    that were written before the timeout, and then the error, which `sent` raises.
    """

    def __init__(
        self, work: AsyncExitStack, timeout_seconds: float, on_timeout: Callable[[], None]
    ) -> None:
        self._work = work
        self._timeout = timeout_seconds
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._sending_began = 0
        self._error: Aborted | None = None
        self._ending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout, self._check_client)
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()

    def sending(self) -> None:
        self._sending_since = self._loop.time()
        self._sending_began = time.perf_counter_ns()

    def sent(self) -> int:
        """Marks the message as written. Returns the duration of the write in nanoseconds. Raises
        Aborted if the stream has timed out.
        """
        self._sending_since = None
        if self._error is not None:
            raise self._error
        return time.perf_counter_ns() - self._sending_began

    def _check_client(self) -> None:
        now = self._loop.time()
        since = now if self._sending_since is None else self._sending_since
        if now - since < self._timeout:
            self._timer = self._loop.call_at(since + self._timeout, self._check_client)
            return
        self._on_timeout()
        self._error = Aborted(
            f"the client read no message for {self._timeout:g} s", reason="READER_TOO_SLOW"
        )
        self._ending = asyncio.create_task(self._end(self._error))

    async def _end(self, error: Aborted) -> None:
        with suppress(Aborted):
            await self._work.__aexit__(Aborted, error, None)


logger = logging.getLogger(__name__)


class MessageStream:
    """Writes one message for each non-empty piece of an answer. During a write `is_ready` is false,
    so that the Delivery merges the pieces that arrive.
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
        """Writes the unwritten pieces. Raises Aborted if the client has stopped reading."""
        for piece in self._unwritten:
            self._reader.sending()
            await self._context.write(self._to_message(piece))
            self._record.write_nanos += self._reader.sent()
        self._unwritten = []


@dataclass(eq=False)
class AnswerStreams:
    """Streams answers to clients, and ends the streams of clients that stop reading."""

    inference: Inference
    metrics: Metrics
    reader_timeout_seconds: float

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
        """Runs a generation and writes its pieces. `work` is the stack of the call's context
        managers, which is closed with an error if the client stops reading. `arrival` is ended just
        before the sequences are sent to replicas.
        """
        with StreamReaderTimeout(
            work, self.reader_timeout_seconds, self._reader_timed_out
        ) as reader:
            stream = MessageStream(to_message, context, reader, record)
            watched = work.enter_context(observation.watching(generation, stream, stream=True))
            delivery = self.inference.delivery(generation, watched, stream=True)
            work.callback(delivery.close)
            arrival.end()
            await delivery.run()

    def _reader_timed_out(self) -> None:
        self.metrics.reader_timed_out("grpc")
        logger.warning("a request is ended because its gRPC client stopped reading")
