"""Delivers the output of a generation (a client's request while it runs) to its reader, such as an
HTTP response.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from itertools import chain
from typing import Protocol

from services.common.errors import StepwellError
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.delta import Delta, parts_of
from services.gateway.core.request.engine import DeltaSource, Source
from services.gateway.core.request.generation import Answer, Generation

TOKENS_AT_A_TIME = 128
"""Limit on the number of tokens that are converted to text in one iteration of the event loop."""


class Sink(Protocol):
    """Receives the pieces (new text and tokens) of a generation's answers."""

    @property
    def is_ready(self) -> bool:
        """Whether `put` may be called. If it is false, `drain` must be awaited first."""

    def put(self, added: list[Piece]) -> None:
        """Accepts new pieces. The list is empty if the only news is that a replica has scheduled a
        sequence.
        """

    async def drain(self) -> None:
        """Sends all pieces that were put. Returns when the sink is ready again."""


class Delivery:
    """Runs a generation's sequences at an engine (all replicas together), and puts their output
    into a sink.

    Normally callbacks of the event loop make the pieces and put them into the sink, because waking
    a task for each piece would cost several times as much. At the start and after each drain, the
    task of `run` puts the next output itself, so that it can drain the sink in the same iteration
    of the event loop. Output that arrives during a drain is put into the sink after the drain.

    If there are many tokens, for example after a long drain, they are put in several parts, so that
    the event loop can do other work between two parts.
    """

    def __init__(
        self, generation: Generation, engine: Source, sink: Sink, min_tokens: int = 1
    ) -> None:
        """The first tokens of a sequence are put into the sink at once. Later tokens follow in
        groups of at least `min_tokens`, or earlier together with other output. If the request has
        stop strings, every token is put into the sink as soon as it arrives, since it may be the
        last.
        """
        self._min_tokens = 1 if generation.request.stop else min_tokens
        self._generation = generation
        self._engine = engine
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._source: DeltaSource | None = None
        self._parts: deque[Sequence[tuple[int, Delta]]] = deque()
        self._is_due = False
        self._is_for_task = True
        """Whether the task of `run`, and not a callback, puts the next output."""
        self._wanted: asyncio.Future[None] | None = None
        """The future that the task of `run` awaits. It is None while the task is busy."""
        self._error: Exception | None = None

    async def run(self) -> None:
        """Starts the sequences. Returns when every answer has ended and was delivered.

        Raises StepwellError if the engine refuses the request or fails, and any error that `put` or
        `drain` raises. After an error, unfinished sequences are aborted.
        """
        generation = self._generation
        try:
            self._source = generation.start(self._engine)
            self._source.listen(self._deliver_soon, self._min_tokens)
            while generation.num_open:
                wanted = self._wanted = self._loop.create_future()
                self._deliver()
                try:
                    await wanted
                finally:
                    self._wanted = None
                if not self._sink.is_ready:
                    await self._sink.drain()
                if self._error is not None:
                    raise self._take_error()
                if self._parts:
                    await asyncio.sleep(0)
        finally:
            self.close()

    def end(self, error: StepwellError) -> None:
        """Makes `run` raise this error. If `run` drains the sink, it raises after the drain."""
        if self._error is None:
            self._error = error
        self._wake()

    def wake(self) -> None:
        """Makes `run` drain the sink soon. Needed if the sink has its own output, such as a
        keep-alive.
        """
        self._wake()

    def close(self) -> None:
        """Aborts unfinished sequences. Idempotent."""
        unread = [*chain.from_iterable(self._parts)]
        self._parts.clear()
        self._generation.close(unread)

    def _deliver_soon(self) -> None:
        if self._is_for_task:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        """The callback: if the task of `run` waits, puts the next part of the output into the sink.
        Wakes the task if it must drain the sink or end.
        """
        self._is_due = False
        if self._wanted is None or self._wanted.done():
            return
        try:
            if self._sink.is_ready and not self._put_next():
                return
        except Exception as error:
            self._error = error
        self._wake()

    def _put_next(self) -> bool:
        """Puts the next part of the output, if there is any, into the sink. Returns whether the
        task of `run` must drain the sink or end.
        """
        assert self._source is not None
        if self._parts:
            part = self._parts.popleft()
            self._deliver_soon()
        elif deltas := self._source.take():
            part, *rest = parts_of(deltas, TOKENS_AT_A_TIME)
            if rest:
                self._parts.extend(rest)
                self._deliver_soon()
        else:
            return False
        self._sink.put(self._generation.accept(part))
        self._is_for_task = not self._sink.is_ready
        return self._is_for_task or not self._generation.num_open

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _take_error(self) -> Exception:
        """Returns the error and removes the reference to it. The error's traceback refers to this
        delivery, so a reference from the delivery to the error would form a cycle.
        """
        error, self._error = self._error, None
        assert error is not None
        return error


class Answers:
    """A sink that collects whole answers."""

    is_ready = True

    def __init__(self, generation: Generation) -> None:
        self.answers = [Answer() for _ in generation.choices]

    def put(self, added: list[Piece]) -> None:
        for piece in added:
            self.answers[piece.index].add(piece)

    async def drain(self) -> None: ...


async def received(source: DeltaSource) -> list[tuple[int, Delta]]:
    """Waits for output of the sequences and returns it. Only one call per source may wait."""
    news = asyncio.Event()
    source.listen(news.set)
    while not (deltas := source.take()):
        news.clear()
        await news.wait()
    return deltas
