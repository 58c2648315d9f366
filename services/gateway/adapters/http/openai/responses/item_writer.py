"""Writes the assistant's output as items: whole, or as the events of a stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

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

_DIGITS = 32
_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_PREFIXES = {_MESSAGE: "msg_", _REASONING: "rs_", _CALL: "fc_"}
_TEXT_OF = {_MESSAGE: "output_text", _REASONING: "reasoning_text"}
"""Maps kinds of items to the type of their only part, which is in the names of events, too."""


@dataclass(slots=True)
class _Item:
    """An item that has begun: its constant fields, and the pieces of its text so far."""

    kind: str
    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXT_OF[self.kind], "text": text}
        if self.kind == _MESSAGE:
            part |= {"annotations": [], "logprobs": []}
        return part

    def begun(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"arguments": ""} if self.kind == _CALL else {"content": []}
        return {**self.head, "status": "in_progress", **empty}

    def ended(self, status: str) -> dict[str, Any]:
        if self.kind == _CALL:
            return {**self.head, "status": status, "arguments": self.text}
        return {**self.head, "status": status, "content": [self.part(self.text)]}


class ItemWriter:
    """Writes the items of one request's answer. Each item ends before the next begins."""

    def __init__(
        self,
        request: ClientRequest,
        arrival_unix_nanos: int,
        namespaced: Mapping[str, dict[str, str]],
    ) -> None:
        """`namespaced` maps the names of some functions to the fields that name them in calls."""
        self.items: list[dict[str, Any]] = []
        self._request = request
        self._arrival = arrival_unix_nanos
        self._namespaced = namespaced
        self._item: _Item | None = None

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the events for one piece of the answer. Call `end` after the last piece."""
        added: list[OutputEvent] | None = piece.events
        if added is None:
            added = [ContentDelta(piece.text)] if piece.text else []
        return [written for event in added for written in self._write(event)]

    def whole(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        """Returns the items of a whole answer. `status` is the status of the last item."""
        events = _events_of(answer)
        if self._request.output_form is None:
            events = [ContentDelta(answer.text)] if answer.text else []
        for event in events:
            for _ in self._write(event):
                pass
        self.end(status)
        return self.items

    def end(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the current item, if there is one. Returns its last events."""
        item, self._item = self._item, None
        if item is None:
            return []
        where = {"item_id": item.head["id"], "output_index": len(self.items)}
        body = item.ended(status)
        self.items.append(body)
        if item.kind == _CALL:
            kind = "response.function_call_arguments.done"
            done = [{"type": kind, **where, "arguments": item.text, "name": item.head["name"]}]
        else:
            where["content_index"] = 0
            text = {"text": item.text, **_logprobs(item)}
            done = [
                {"type": f"response.{_TEXT_OF[item.kind]}.done", **where, **text},
                {"type": "response.content_part.done", **where, "part": item.part(item.text)},
            ]
        index = where["output_index"]
        return [*done, {"type": "response.output_item.done", "output_index": index, "item": body}]

    def _write(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        match event:
            case ContentDelta(text):
                yield from self._add(_MESSAGE, text)
            case ReasoningDelta(text):
                yield from self._add(_REASONING, text)
            case CallStart(call, name):
                name_of_call = call_id(self._request, self._arrival, 0, call, "call_")
                named = self._namespaced.get(name, {"name": name})
                yield from self._begin(_CALL, {"call_id": name_of_call, **named})
            case CallArguments(_, text):
                assert self._item is not None
                self._item.pieces.append(text)
                kind = "response.function_call_arguments.delta"
                yield {"type": kind, **self._where(), "delta": text}

    def _add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._item is None or self._item.kind != kind:
            of_kind: dict[str, Any] = {"role": "assistant"} if kind == _MESSAGE else {"summary": []}
            yield from self._begin(kind, of_kind)
        assert self._item is not None
        self._item.pieces.append(text)
        where = {**self._where(), "content_index": 0}
        more = {"delta": text, **_logprobs(self._item)}
        yield {"type": f"response.{_TEXT_OF[kind]}.delta", **where, **more}

    def _begin(self, kind: str, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.end()
        item = self._item = _Item(kind, {"id": self._id(kind), "type": kind, **head})
        index = len(self.items)
        yield {"type": "response.output_item.added", "output_index": index, "item": item.begun()}
        if kind != _CALL:
            part = {"content_index": 0, "part": item.part("")}
            yield {"type": "response.content_part.added", **self._where(), **part}

    def _where(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item.head["id"], "output_index": len(self.items)}

    def _id(self, kind: str) -> str:
        name = f"{self._request.request_id}/{self._arrival}/{len(self.items)}"
        return _PREFIXES[kind] + sha256(name.encode()).hexdigest()[:_DIGITS]


def _logprobs(item: _Item) -> dict[str, Any]:
    return {"logprobs": []} if item.kind == _MESSAGE else {}


def _events_of(answer: Answer) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    for part in answer.message.parts:
        if isinstance(part, ParsedCall):
            call = sum(isinstance(event, CallStart) for event in events)
            events += [CallStart(call, part.name), CallArguments(call, part.arguments)]
        else:
            events.append(part)
    return events
