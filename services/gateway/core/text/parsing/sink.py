"""Collects the events that the readers of the formats report."""

from services.gateway.core.text.parsing.control_escaper import ControlEscaper
from services.gateway.core.text.parsing.events import (
    CallArguments,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
)


def encodable(text: str) -> str:
    """Replaces each half of a surrogate pair by U+FFFD. A model may write an escape of half a pair,
    such as \\ud800, but UTF-8 cannot encode it.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Sink:
    """Makes events from the text that the readers of the formats report. Drops white space between
    content, reasoning and calls, because it is part of the format. Escapes control characters in
    strings of arguments. Names and arguments are encodable.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self.in_reasoning = False
        self.num_calls = 0
        self._events: list[OutputEvent] = []
        self._arguments: list[str] = []
        self._escaper = ControlEscaper()
        self._space: list[str] = []
        self._trims_start = False

    def take(self) -> list[OutputEvent]:
        """Returns the events since the last call of `take`."""
        self._close_arguments()
        events, self._events = self._events, []
        return events

    def drop_space(self) -> None:
        """Drops the white space that is held back."""
        self._space.clear()

    def content(self, text: str) -> None:
        self._text(text, ContentDelta)

    def reasoning(self, text: str) -> None:
        self._text(text, ReasoningDelta)

    def begin_reasoning(self) -> None:
        self._boundary()
        self.in_reasoning = True

    def end_reasoning(self) -> None:
        self._boundary()
        self.in_reasoning = False

    def call(self, name: str) -> int:
        """Starts a tool call. Returns the call's index."""
        self._close_arguments()
        self._escaper = ControlEscaper()
        self._boundary()
        if not self._is_full:
            self._events.append(CallStart(self.num_calls, encodable(name)))
        self.num_calls += 1
        return self.num_calls - 1

    def arguments(self, text: str) -> None:
        """Adds a piece of arguments to the last tool call."""
        self._arguments.append(text)

    def whole_call(self, name: str, arguments: str) -> None:
        self.call(name)
        self.arguments(arguments)

    def end(self) -> None:
        """Ends the text. White space at its end is kept if the answer has no calls."""
        if self._space and not self.num_calls and not self.in_reasoning:
            self._events.append(ContentDelta("".join(self._space)))
        self._space.clear()

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _close_arguments(self) -> None:
        text = self._escaper.feed(encodable("".join(self._arguments)))
        if text and (self._max_calls is None or self.num_calls <= self._max_calls):
            self._events.append(CallArguments(self.num_calls - 1, text))
        self._arguments.clear()

    def _boundary(self) -> None:
        self.drop_space()
        self._trims_start = True

    def _text(self, text: str, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        if self._trims_start:
            text = text.lstrip()
        if not text:
            return
        self._trims_start = False
        solid = text.rstrip()
        if solid:
            self._close_arguments()
            self._events.append(kind("".join(self._space) + solid))
            self._space.clear()
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])
