"""Parsed parts of an answer's text, as events and as a whole message."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The name of a tool that is called; `call` counts the calls of one answer from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of a call that has started; joined they are JSON, unless the
    model broke off or wrote something else.
    """

    call: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | CallStart | CallArguments
"""Events come in the order of the model's text."""


@dataclass(slots=True)
class ParsedCall:
    """A call as far as it was written."""

    name: str
    arguments: str


MessagePart = ContentDelta | ReasoningDelta | ParsedCall


@dataclass(slots=True)
class _Part:
    """Pieces of one text: of content, of reasoning, or of the arguments of a call."""

    kind: type[ContentDelta] | type[ReasoningDelta] | None
    """None: of a call."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class ParsedMessage:
    """The events of one answer, put together."""

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
        return self._joined(ContentDelta)

    @property
    def reasoning(self) -> str:
        return self._joined(ReasoningDelta)

    @property
    def calls(self) -> list[ParsedCall]:
        return [ParsedCall(call.name, call.text) for call in self._calls]

    def _part(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> _Part:
        """The last part, if it is of that kind, or a new one."""
        if not self._parts or self._parts[-1].kind is not kind:
            self._parts.append(_Part(kind))
        return self._parts[-1]

    def _joined(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
        return "".join(part.text for part in self._parts if part.kind is kind)
