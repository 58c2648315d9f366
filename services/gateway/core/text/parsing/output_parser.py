"""The incremental parser of one answer."""

from collections.abc import Callable, Sequence

from services.gateway.core.text.parsing.events import OutputEvent
from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.reasoning import ReasoningFormat, read_reasoning
from services.gateway.core.text.parsing.sink import Sink

ReadAnswer = Callable[[Reader, Sink], Reading[None]]
"""A format's function that reads an answer from the end of the reasoning to the answer's end."""


class OutputParser:
    """Parses the text of one answer, which begins with reasoning in one format and continues in
    another format. The joined events do not depend on how the text is split. The readers of both
    formats are generators, which keep their state between two pieces of text. Each character is
    read once, except in a marker that may be incomplete.
    """

    def __init__(
        self,
        read_answer: ReadAnswer,
        reasoning: ReasoningFormat | None = None,
        *,
        call_starts: tuple[str, ...] = (),
        begins_in_reasoning: bool = False,
        max_calls: int | None = None,
        before: str = "",
    ) -> None:
        """`call_starts` are texts that end reasoning which has no end mark. Calls after the first
        `max_calls` calls are dropped. `before` is text at the end of the prompt that the answer
        continues. It is parsed first, and its events are dropped.
        """
        self._reader = Reader()
        self._sink = Sink(max_calls)
        self._sink.in_reasoning = begins_in_reasoning
        self._work = self._read(read_answer, reasoning, call_starts)
        next(self._work)
        if before:
            self.feed(before)
            self._sink.drop_space()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._sink.in_reasoning

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Adds text. Returns the new events, which later text cannot change."""
        self._reader.feed(text)
        return self._go_on()

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputEvent]:
        """Ends the text. Returns the remaining events. If the text was cut before the model ended
        it (`is_cut`), a call in progress stays incomplete.
        """
        self._reader.end(is_cut=is_cut)
        return self._go_on()

    def _go_on(self) -> Sequence[OutputEvent]:
        next(self._work, None)
        return self._sink.take()

    def _read(
        self,
        read_answer: ReadAnswer,
        reasoning: ReasoningFormat | None,
        call_starts: tuple[str, ...],
    ) -> Reading[None]:
        yield
        if reasoning is not None:
            yield from read_reasoning(self._reader, self._sink, reasoning, call_starts)
        yield from read_answer(self._reader, self._sink)
        yield from self._reader.rest(self._sink.content)
        self._sink.end()
