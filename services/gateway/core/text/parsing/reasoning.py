"""Reads the reasoning at the start of an answer, between a start mark and an end mark. The start
mark is often already at the end of the prompt.
"""

from dataclasses import dataclass
from enum import Enum

from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.sink import Sink


class ReasoningState(Enum):
    """Where an answer starts relative to its reasoning. The prompt determines the state."""

    AHEAD = "ahead"
    """Before the reasoning, which may be missing."""
    INSIDE = "inside"
    """Inside the reasoning."""
    OVER = "over"
    """After the reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. If `is_assumed` is true, an answer starts with reasoning
    even without a start mark, unless the prompt already has the end mark. `answer` is an optional
    third mark, which starts text that is not reasoning.
    """

    start: str
    end: str
    is_assumed: bool = False
    answer: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start, self.end, self.answer)))

    def state_after(self, prompt: str, turn: str) -> ReasoningState:
        """Returns the state at the end of a prompt. `turn` is the text of the last message in the
        prompt, which the answer continues.

        The last mark in `turn` determines the state, as in vLLM's `is_reasoning_end`. If `turn` has
        no mark, the state is AHEAD. But it is INSIDE if `is_assumed` is true and the earlier
        messages have no mark, or a start mark as their last mark.
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
    """The reasoning format, and the state at the end of one prompt."""

    form: ReasoningFormat
    state: ReasoningState


def read_reasoning(
    reader: Reader, sink: Sink, form: ReasoningFormat, call_starts: tuple[str, ...] = ()
) -> Reading[None]:
    """Reads the reasoning at the start of the text, if there is any. Reasoning without an end mark
    ends before the first of `call_starts`, since models sometimes omit the mark before a call.
    """
    if not sink.in_reasoning:
        space: list[str] = []
        first = yield from _leading_space(reader, space)
        if not first or not (yield from reader.starts_with(form.start)):
            sink.content("".join(space))
            return
    sink.begin_reasoning()
    if (yield from _repeats_start(reader, form)):
        sink.begin_reasoning()
    marker = yield from reader.until((form.end, *call_starts), sink.reasoning)
    if marker in call_starts:
        text, end = yield from reader.text_until((form.end,))
        if end:
            sink.reasoning(marker + text)
        else:
            reader.unread(marker + text)
    if marker:
        sink.end_reasoning()


def _leading_space(reader: Reader, space: list[str]) -> Reading[str]:
    while (first := (yield from reader.peek(1))) and first in " \t\r\n":
        space.append(first)
        reader.skip(1)
    return first


def _repeats_start(reader: Reader, form: ReasoningFormat) -> Reading[bool]:
    yield from reader.skip_space()
    return bool((yield from reader.starts_with(form.start)))
