"""Gives what comes of a generation to its reader."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from typing import Protocol

from services.common.errors import StepwellError
from services.gateway.core.ports import DeltaSource, Source
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.delta import Delta, parts_of
from services.gateway.core.request.generation import Answer, Generation

TOKENS_AT_A_TIME = 128
"""Tokens that are turned into text in one turn of the event loop."""


class Sink(Protocol):
    """Takes the pieces of a generation."""

    @property
    def is_ready(self) -> bool:
        """Whether `put` may be called now; else after `drain`."""

    def put(self, added: list[Piece]) -> None:
        """Takes what was added to answers, an empty list where a sequence was only scheduled."""

    async def drain(self) -> None:
        """Passes on all that the sink was given, and returns when it is ready again."""


class Delivery:
    """One run of a generation: its sequences at an engine, and the sink for what comes of them.

    Pieces are made and put in callbacks of the event loop. To wake a task for each of them, with
    what it awaits, would cost several times what the piece does. Where the sink had to be drained
    after the last one, and at the beginning, the task that runs the delivery puts the next one, so
    that it is drained in the same turn. What comes meanwhile is merged.

    Many tokens, as after a pause of the sink, are put in several parts, between which the event
    loop turns.
    """

    def __init__(
        self, generation: Generation, engine: Source, sink: Sink, min_tokens: int = 1
    ) -> None:
        """After the first tokens of a sequence, `min_tokens` of them are put together, or fewer if
        something else comes. With stop strings each is put by itself, since it may be the last.
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
        """Whether the task puts what comes next."""
        self._wanted: asyncio.Future[None] | None = None
        """What the task waits for; None while it does something else."""
        self._error: Exception | None = None

    async def run(self) -> None:
        """Starts the sequences, and returns when every answer has ended and was passed on.

        Raises StepwellError when the engine refuses or gives up, and what `put` and `drain` raise.
        What has not ended is aborted then.
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
        """Has `run` raise an error, once the sink is drained if it is being drained."""
        if self._error is None:
            self._error = error
        self._wake()

    def wake(self) -> None:
        """Has the sink drained soon, which has something to send of its own."""
        self._wake()

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        self._generation.close()

    def _deliver_soon(self) -> None:
        if self._is_for_task:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        """Puts the next part of what came, unless the task is at work; wakes the task if it is to
        go on.
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
        """Puts the next part of what came; returns whether the task is to go on. After one of
        several parts it is called again soon.
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
        """The error, which is not kept: it refers to the frames that refer to this delivery."""
        error, self._error = self._error, None
        assert error is not None
        return error


class Answers:
    """A sink that puts answers together, for a reader who wants them whole."""

    is_ready = True

    def __init__(self, generation: Generation) -> None:
        self.answers = [Answer() for _ in generation.choices]

    def put(self, added: list[Piece]) -> None:
        for piece in added:
            self.answers[piece.index].add(piece)

    async def drain(self) -> None:
        """It is always ready."""


async def received(source: DeltaSource) -> list[tuple[int, Delta]]:
    """Waits until something came of sequences, and takes it. One call at a time."""
    news = asyncio.Event()
    source.listen(news.set)
    while not (deltas := source.take()):
        news.clear()
        await news.wait()
    return deltas
