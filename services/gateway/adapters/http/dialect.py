"""What completions and chat completions have in common on the way out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.finish_reason import FinishReason
from services.gateway.adapters.http.json_pieces import (
    HoldsLongList,
    LongList,
    json_pieces,
    to_json,
)
from services.gateway.adapters.http.token_text import TokenText
from services.gateway.core.choice import Piece
from services.gateway.core.generation import Answer, Usage
from services.gateway.core.request import ClientRequest


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is written around the choices of every answer and chunk."""

    id: str
    created: int
    model: str
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    return_token_ids: bool
    return_prompt_logprobs: bool


class Dialect(ABC):
    """One API's way to write answers and chunks."""

    whole_object: str
    chunk_object: str

    def __init__(self, envelope: Envelope, request: ClientRequest, tokens: TokenText) -> None:
        self.envelope = envelope
        self.request = request
        self.tokens = tokens
        head = to_json(self._head(self.chunk_object)).encode()
        tail = b'],"usage":null}\n\n' if envelope.include_usage else b"]}\n\n"
        self._frame_without_usage = b"data: " + head[:-1] + b',"choices":[', tail

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks that come before any token."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the chunks that a piece makes, if any."""

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""

    def extras(self, _answers: Sequence[Answer]) -> dict[str, Any]:
        """Further fields of the whole."""
        return {}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed, whose choices are made when it is sent."""
        choices = (self.choice(index, answer) for index, answer in enumerate(answers))
        return {
            **self._head(self.whole_object),
            "choices": LongList(choices, nested=True),
            "usage": usage_body(usage),
            **self.extras(answers),
        }

    def encode_chunks(
        self, choices: Sequence[dict[str, Any]], usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        """Server-sent events, one per choice, all in one piece unless they hold long lists.

        `usage` is called where every chunk holds it.
        """
        head, tail = self._frame(usage)
        events: list[bytes] = []
        for choice in choices:
            try:
                events.append(head + to_json(choice).encode() + tail)
            except HoldsLongList:
                yield b"".join([*events, head])
                yield from json_pieces(choice)
                events = [tail]
        yield b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        """The last events: token counts where asked for, and the mark of the end."""
        if not self.envelope.include_usage:
            return b"data: [DONE]\n\n"
        body = {**self._head(self.chunk_object), "choices": [], "usage": usage_body(usage)}
        return event(body) + b"data: [DONE]\n\n"

    def _frame(self, usage: Callable[[], Usage]) -> tuple[bytes, bytes]:
        if not self.envelope.usage_in_every_chunk:
            return self._frame_without_usage
        counts = to_json(usage_body(usage())).encode()
        return self._frame_without_usage[0], b'],"usage":' + counts + b"}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        envelope = self.envelope
        return {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created,
            "model": envelope.model,
        }


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body).encode() + b"\n\n"


def stop_reason(piece: Piece) -> str | int | None:
    """What ended an answer, as vLLM writes it: a stop string, a stop token, a repetition."""
    if piece.finish_reason is FinishReason.REPETITION:
        return "repetition_detected"
    return piece.stop_reason


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
