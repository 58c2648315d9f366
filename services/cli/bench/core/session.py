"""The requests of a load, in sessions of one or several turns. Each turn is one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation, `role` as in the chat API."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, as the messages that it adds to the conversation, and the length of its answer.
    The request is sent `think_seconds` after the end of the previous answer.
    """

    messages: tuple[Message, ...]
    output_len: int
    think_seconds: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `arrival_seconds` counts from the load's start. None if not set."""

    number: int
    turns: Sequence[Turn]
    arrival_seconds: float | None = None


class Conversation:
    """The history of a session, from which prompts are built. Each answer of the server becomes
    part of the next prompt. In the completions API the prompt is the concatenated text. A space
    precedes each added message, so that words stay separate.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._messages: list[Message] = []

    def ask(self, turn: Turn) -> dict[str, Any]:
        """Adds a turn. Returns the fields of its request, `messages` or `prompt`."""
        self._messages += turn.messages
        if self._is_chat:
            messages = [{"role": one.role, "content": one.content} for one in self._messages]
            return {"messages": messages, **turn.fields}
        return {"prompt": self._text(), **turn.fields}

    def answered(self, text: str) -> None:
        """Adds the server's answer to the history."""
        self._messages.append(Message("assistant", text))

    def _text(self) -> str:
        parts: list[str] = []
        for message in self._messages:
            if parts and message.role != "assistant":
                parts.append(" ")
            parts.append(message.content)
        return "".join(parts)
