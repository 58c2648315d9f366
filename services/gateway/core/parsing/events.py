"""What an answer's text turns out to be, piece by piece, and the whole of it."""

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


@dataclass(slots=True)
class ParsedMessage:
    """The events of one answer, put together."""

    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    def add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case CallStart(_, name):
                    self._names.append(name)
                    self._arguments.append([])
                case CallArguments(call, text):
                    self._arguments[call].append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ParsedCall]:
        joined = ("".join(pieces) for pieces in self._arguments)
        return [ParsedCall(*pair) for pair in zip(self._names, joined, strict=True)]
