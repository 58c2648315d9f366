"""The requests of a load, in sessions of one or several turns. Each turn is one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation. `role` is the chat API's role."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the messages that it adds to the conversation, and the length of its output. The
    request is sent `think_seconds` after the end of the previous response.
    """

    messages: tuple[Message, ...]
    output_len: int
    think_seconds: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the request's body."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `arrival_seconds` is its arrival time after the load's start, if known."""

    number: int
    turns: Sequence[Turn]
    arrival_seconds: float | None = None


class Conversation:
    """The history of a session, from which prompts are built. Each output of the server becomes
    part of the next prompt. In the completions API the prompt is the concatenated text, in which a
    space precedes each message of a turn, so that words stay separate.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._messages: list[Message] = []

    def ask(self, turn: Turn) -> dict[str, Any]:
        """Adds a turn. Returns the fields of its request, which include `messages` or `prompt`."""
        self._messages += turn.messages
        if self._is_chat:
            messages = [{"role": one.role, "content": one.content} for one in self._messages]
            return {"messages": messages, **turn.fields}
        return {"prompt": self._text(), **turn.fields}

    def answered(self, text: str) -> None:
        self._messages.append(Message("assistant", text))

    def _text(self) -> str:
        parts: list[str] = []
        for message in self._messages:
            if parts and message.role != "assistant":
                parts.append(" ")
            parts.append(message.content)
        return "".join(parts)
