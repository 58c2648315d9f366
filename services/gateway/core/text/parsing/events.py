"""The parsed parts of an answer's text, as events and as a whole message."""

from collections.abc import Iterable
from dataclasses import dataclass, field

SEPARATOR = "\n"
"""The text that joins parts of the same kind, such as content before and after a call, in APIs
whose messages have one content. The white space that models write around calls is in no event,
because it belongs to the format of calls.
"""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning text before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. `call` is the index of the call in the answer."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call with index `call`. The joined parts are valid JSON if the
    model wrote complete and valid arguments.
    """

    call: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | CallStart | CallArguments
"""Any event. Events follow the order of the model's text."""


@dataclass(slots=True)
class ParsedCall:
    """A tool call with the arguments that the model has written so far."""

    name: str
    arguments: str


MessagePart = ContentDelta | ReasoningDelta | ParsedCall


@dataclass(slots=True)
class _Part:
    """The pieces of one text: content, reasoning, or the arguments of a call."""

    kind: type[ContentDelta] | type[ReasoningDelta] | None
    """The event class of the text. None means arguments of a call."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class ParsedMessage:
    """The joined events of one answer."""

    _parts: list[_Part] = field(default_factory=list)
    _calls: list[_Part] = field(default_factory=list)

    def add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text) | ReasoningDelta(text):
                    self._part(type(event)).pieces.append(text)
                case CallStart(_, name):
                    self._calls.append(_Part(None, name))
                    self._parts.append(self._calls[-1])
                case CallArguments(call, text):
                    self._calls[call].pieces.append(text)

    @property
    def parts(self) -> list[MessagePart]:
        """Content, reasoning and calls in the order of the model's text."""
        return [
            ParsedCall(part.name, part.text) if part.kind is None else part.kind(part.text)
            for part in self._parts
        ]

    @property
    def content(self) -> str:
        """All content. Content before and after a call is separated by a line feed."""
        return self._joined(ContentDelta)

    @property
    def reasoning(self) -> str:
        return self._joined(ReasoningDelta)

    @property
    def calls(self) -> list[ParsedCall]:
        return [ParsedCall(call.name, call.text) for call in self._calls]

    def _part(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> _Part:
        if not self._parts or self._parts[-1].kind is not kind:
            self._parts.append(_Part(kind))
        return self._parts[-1]

    def _joined(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
        return SEPARATOR.join(part.text for part in self._parts if part.kind is kind)
