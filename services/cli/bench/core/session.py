"""What is sent: sessions of one or several turns, each a request to the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation, `role` as in the chat API."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the conversation gets before it, and how long the answer is to be.

    `think_seconds` pass between the end of the answer before and this request.
    """

    messages: tuple[Message, ...]
    output_len: int
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `arrival_seconds` after the start of the load where the load says when."""

    number: int
    turns: Sequence[Turn]
    arrival_seconds: float | None = None


class Conversation:
    """The history of a session, as the server is asked to see it.

    The answer of each turn is part of the next prompt, as the server gave it. In the completions
    API the prompt is the concatenated text, with a space before what is added after an answer or a
    message, so that words stay apart.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._messages: list[Message] = []

    def ask(self, turn: Turn) -> dict[str, Any]:
        """Adds a turn; returns the fields of its request, `messages` or `prompt`."""
        self._messages += turn.messages
        if self._is_chat:
            return {
                "messages": [
                    {"role": message.role, "content": message.content} for message in self._messages
                ]
            }
        return {"prompt": self._text()}

    def answered(self, text: str) -> None:
        """Adds the server's answer."""
        self._messages.append(Message("assistant", text))

    def _text(self) -> str:
        parts: list[str] = []
        for message in self._messages:
            if parts and message.role != "assistant":
                parts.append(" ")
            parts.append(message.content)
        return "".join(parts)
