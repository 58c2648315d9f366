"""Reasoning before an answer, between two markers, the first of which often ends the prompt."""

from dataclasses import dataclass
from enum import Enum

from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.sink import Sink


class ReasoningState(Enum):
    """The place of an answer's first character, by its prompt."""

    AHEAD = "ahead"
    """Before the reasoning, if there is some."""
    INSIDE = "inside"
    """Within the reasoning."""
    OVER = "over"
    """Behind the reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks what it thinks. `is_assumed`: it thinks without being asked to, so that
    an answer begins with reasoning unless the prompt has ended it. `answer` is a further mark, of
    a part that is no reasoning.
    """

    start: str
    end: str
    is_assumed: bool = False
    answer: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start, self.end, self.answer)))

    def state_after(self, prompt: str, turn: str) -> ReasoningState:
        """The state at the end of a prompt, whose last part `turn` begins the answer.

        The last mark in that part decides, as in vLLM's `is_reasoning_end`. Without one, an end in
        an earlier turn refutes that reasoning is assumed; a start that was left open there is text.
        """
        last = self._last_mark(turn)
        if last is not None:
            return ReasoningState.INSIDE if last == self.start else ReasoningState.OVER
        if self.is_assumed and self._last_mark(prompt) in (None, self.start):
            return ReasoningState.INSIDE
        return ReasoningState.AHEAD

    def _last_mark(self, text: str) -> str | None:
        at, mark = max((text.rfind(mark), mark) for mark in self.marks)
        return mark if at >= 0 else None


@dataclass(frozen=True, slots=True)
class PromptedReasoning:
    """The reasoning of answers to one prompt."""

    form: ReasoningFormat
    state: ReasoningState


def read_reasoning(reader: Reader, sink: Sink, form: ReasoningFormat) -> Reading[None]:
    """Reads the reasoning that comes first, if there is some."""
    if not sink.in_reasoning:
        space: list[str] = []
        first = yield from _leading_space(reader, space)
        if not first or not (yield from reader.starts_with(form.start)):
            sink.content("".join(space))
            return
    sink.begin_reasoning()
    if (yield from _repeats_start(reader, form)):
        sink.begin_reasoning()
    if (yield from reader.until((form.end,), sink.reasoning)):
        sink.end_reasoning()


def _leading_space(reader: Reader, space: list[str]) -> Reading[str]:
    while (first := (yield from reader.peek(1))) and first in " \t\r\n":
        space.append(first)
        reader.skip(1)
    return first


def _repeats_start(reader: Reader, form: ReasoningFormat) -> Reading[bool]:
    """Models that were put into their reasoning by the prompt sometimes mark its start again."""
    yield from reader.skip_space()
    return bool((yield from reader.starts_with(form.start)))
