"""Writes the assistant's output as content blocks: whole, or as the events of a stream."""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

from services.gateway.adapters.http.anthropic.input_json import InputWriter
from services.gateway.adapters.http.openai.chat_messages import call_id
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.text.parsing.events import (
    CallArguments,
    CallStart,
    ContentDelta,
    OutputEvent,
    ParsedCall,
    ReasoningDelta,
)

_PREFIX = "toolu_"
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"


class BlockWriter:
    """Writes the blocks of one request's answer. Each block ends before the next begins.

    Thinking blocks have a signature, because clients send back only blocks that have one. It is the
    SHA-256 of the block's text, and the server does not verify it.
    """

    def __init__(
        self, request: ClientRequest, arrival_unix_nanos: int, *, shows_thinking: bool
    ) -> None:
        """If `shows_thinking` is false, thinking blocks are written with empty text."""
        self._request = request
        self._arrival = arrival_unix_nanos
        self._shows_thinking = shows_thinking
        self._number = -1
        self._open: str | None = None
        """The type of the open block, or None."""
        self._thought = sha256()
        self._input = InputWriter()

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        added: list[OutputEvent] | None = piece.events
        if added is None:
            added = [ContentDelta(piece.text)] if piece.text else []
        events = [written for event in added for written in self._write(event)]
        if piece.finish_reason is not None:
            events += self._end()
        return events

    def whole(self, answer: Answer) -> list[dict[str, Any]]:
        if self._request.output_form is None:
            return [_text(answer.text)] if answer.text else []
        blocks: list[dict[str, Any]] = []
        num_calls = 0
        for part in answer.message.parts:
            match part:
                case ContentDelta(text):
                    blocks.append(_text(text))
                case ReasoningDelta(text):
                    shown = text if self._shows_thinking else ""
                    blocks.append(_thinking(shown, sha256(text.encode()).hexdigest()))
                case ParsedCall(name, arguments):
                    blocks.append(self._tool_use(num_calls, name, _input(arguments)))
                    num_calls += 1
        return blocks

    def _write(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        match event:
            case ContentDelta(text):
                if self._open != _TEXT:
                    yield from self._begin(_text(""))
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                if self._open != _THINKING:
                    yield from self._begin(_thinking("", ""))
                    self._thought = sha256()
                self._thought.update(text.encode())
                if self._shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(call, name):
                yield from self._begin(self._tool_use(call, name, {}))
                self._input = InputWriter()
            case CallArguments(_, text):
                yield from self._input_deltas(self._input.feed(text))

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._number += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._number, "content_block": block}

    def _end(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == _THINKING:
            signature = self._thought.hexdigest()
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open == _TOOL_USE:
            yield from self._input_deltas(self._input.end())
        self._open = None
        yield {"type": "content_block_stop", "index": self._number}

    def _input_deltas(self, pieces: Iterable[str]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            yield self._delta({"type": "input_json_delta", "partial_json": piece})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._number, "delta": delta}

    def _tool_use(self, call: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        of_call = call_id(self._request, self._arrival, 0, call, _PREFIX)
        return {"type": _TOOL_USE, "id": of_call, "name": name, "input": given}


def _text(text: str) -> dict[str, Any]:
    return {"type": _TEXT, "text": text}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": _THINKING, "thinking": text, "signature": signature}


def _input(arguments: str) -> dict[str, Any]:
    """Converts the arguments of a tool call to the object that the events of a stream would
    have.
    """
    writer = InputWriter()
    given: dict[str, Any] = json.loads("".join([*writer.feed(arguments), *writer.end()]))
    return given
