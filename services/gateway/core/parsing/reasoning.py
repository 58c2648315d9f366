"""Reasoning before an answer, between two markers, the first of which often ends the prompt."""

from dataclasses import dataclass

from services.gateway.core.parsing.reader import Reader, Reading
from services.gateway.core.parsing.sink import Sink


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks what it thinks. `is_assumed`: it thinks without being asked to, so that
    an answer begins with reasoning unless the prompt has ended it.
    """

    start: str
    end: str
    is_assumed: bool = False

    def begins_inside(self, prompt: str) -> bool:
        """Whether what follows this prompt is reasoning from its first character on."""
        if prompt[-256:].rstrip().endswith(self.start):
            return True
        return self.is_assumed and not self.is_over(prompt)

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt has ended it already."""
        return prompt[-256:].rstrip().endswith(self.end)


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
