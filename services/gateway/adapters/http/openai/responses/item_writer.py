"""Writes the assistant's output as items: whole, or as the events of a stream."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from services.gateway.adapters.http.openai.chat_messages import call_id
from services.gateway.adapters.http.openai.responses.custom_input import INPUT, InputDecoder
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
_MESSAGE, _REASONING, _CALL, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
_PREFIXES = {_MESSAGE: "msg_", _REASONING: "rs_", _CALL: "fc_", _CUSTOM: "ctc_"}
_WRITTEN = {_CALL: "arguments", _CUSTOM: INPUT}
"""Maps kinds of calls to the field with the text that the model wrote."""
_EVENTS = {_CALL: "response.function_call_arguments", _CUSTOM: "response.custom_tool_call_input"}
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
        written = _WRITTEN.get(self.kind)
        empty: dict[str, Any] = {"content": []} if written is None else {written: ""}
        return {**self.head, "status": "in_progress", **empty}

    def ended(self, status: str) -> dict[str, Any]:
        if self.kind in _WRITTEN:
            return {**self.head, "status": status, _WRITTEN[self.kind]: self.text}
        return {**self.head, "status": status, "content": [self.part(self.text)]}


class ItemWriter:
    """Writes the items of one request's answer. Each item ends before the next begins."""

    def __init__(
        self,
        request: ClientRequest,
        arrival_unix_nanos: int,
        namespaced: Mapping[str, dict[str, str]],
        custom_names: Collection[str],
    ) -> None:
        """`namespaced` maps the names in the prompt of functions of namespaces to the fields `name`
        and `namespace` of their calls. `custom_names` are the names of custom tools.
        """
        self.items: list[dict[str, Any]] = []
        self._request = request
        self._arrival = arrival_unix_nanos
        self._namespaced = namespaced
        self._custom_names = custom_names
        self._input = InputDecoder()
        """Decodes the input of the last call of a custom tool."""
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
        """Ends the current item, if there is one. Returns the item's last events."""
        item = self._item
        if item is None:
            return []
        last = list(self._written(self._input.end())) if item.kind == _CUSTOM else []
        self._item = None
        where = {"item_id": item.head["id"], "output_index": len(self.items)}
        body = item.ended(status)
        self.items.append(body)
        if item.kind in _WRITTEN:
            named = {"name": item.head["name"]} if item.kind == _CALL else {}
            text = {_WRITTEN[item.kind]: item.text, **named}
            done = [{"type": f"{_EVENTS[item.kind]}.done", **where, **text}]
        else:
            where["content_index"] = 0
            text = {"text": item.text, **_logprobs(item)}
            done = [
                {"type": f"response.{_TEXT_OF[item.kind]}.done", **where, **text},
                {"type": "response.content_part.done", **where, "part": item.part(item.text)},
            ]
        index = where["output_index"]
        ended = {"type": "response.output_item.done", "output_index": index, "item": body}
        return [*last, *done, ended]

    def _write(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        match event:
            case ContentDelta(text):
                yield from self._add(_MESSAGE, text)
            case ReasoningDelta(text):
                yield from self._add(_REASONING, text)
            case CallStart(call, name):
                name_of_call = call_id(self._request, self._arrival, 0, call, "call_")
                named = self._namespaced.get(name, {"name": name})
                kind = _CUSTOM if name in self._custom_names else _CALL
                yield from self._begin(kind, {"call_id": name_of_call, **named})
                self._input = InputDecoder()
            case CallArguments(_, text):
                assert self._item is not None
                is_custom = self._item.kind == _CUSTOM
                yield from self._written(self._input.feed(text) if is_custom else text)

    def _written(self, text: str) -> Iterator[dict[str, Any]]:
        """Yields the event for the next piece of a call's text, if there is one."""
        if text:
            assert self._item is not None
            self._item.pieces.append(text)
            yield {"type": f"{_EVENTS[self._item.kind]}.delta", **self._where(), "delta": text}

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
        if kind not in _WRITTEN:
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
