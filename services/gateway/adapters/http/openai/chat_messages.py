"""Writes the assistant's messages in the schema of chat completions, whole or as deltas."""

from hashlib import sha256
from typing import Any

from services.common.request.finish import FinishReason
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.text.parsing import events

_PREFIX = "chatcmpl-tool-"
_DIGITS = 32


def call_id(
    request: ClientRequest, arrival_unix_nanos: int, choice: int, call: int, prefix: str = _PREFIX
) -> str:
    """Returns the id of a tool call. It is computed from the request's id and arrival, because
    clients may use a request id for several requests, and from the indices. A replayed answer has
    the ids of the first answer. If the model's chat template requires a length of ids, the id has
    this length. Otherwise it begins with `prefix`.
    """
    name = f"{request.request_id}/{arrival_unix_nanos}/{choice}/{call}"
    digest = sha256(name.encode()).hexdigest()
    tools = None if request.output_form is None else request.output_form.tools
    length = None if tools is None else tools.id_length
    return prefix + digest[:_DIGITS] if length is None else digest[:length]


class MessageWriter:
    def __init__(
        self, request: ClientRequest, arrival_unix_nanos: int, *, shows_reasoning: bool
    ) -> None:
        self._request = request
        self._arrival = arrival_unix_nanos
        self._shows_reasoning = shows_reasoning
        self._have_called: set[int] = set()
        self._written: dict[int, list[type[events.OutputEvent]]] = {}
        """Maps each choice to the kinds of its events, in the order of their latest events."""

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.events is None:
            return [{"content": piece.text}] if piece.text else []
        deltas = (self._delta(piece.index, event) for event in piece.events)
        return [delta for delta in deltas if delta]

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if self._request.output_form is None:
            return message
        parsed = answer.message
        message["content"] = parsed.content or (None if parsed.calls or parsed.reasoning else "")
        if parsed.reasoning and self._shows_reasoning:
            message["reasoning"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._request, self._arrival, index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(parsed.calls)
            ]
        return message

    def finish_reason(self, last: Piece, num_calls: int = 0) -> str | None:
        """Returns the finish reason as OpenAI and vLLM write it. It is "tool_calls" for an answer
        with tool calls, except that it is "stop", as in vLLM, if the client named the tool.
        """
        reason = last.finish_reason
        if reason is None:
            return None
        form = self._request.output_form
        has_called = num_calls > 0 or last.index in self._have_called
        if has_called and reason is FinishReason.STOP and form is not None and form.named is None:
            return "tool_calls"
        return reason.value

    def _delta(self, index: int, event: events.OutputEvent) -> dict[str, Any] | None:
        match event:
            case events.ContentDelta(text):
                return {"content": self._separator(index, event) + text}
            case events.ReasoningDelta(text):
                separator = self._separator(index, event)
                return {"reasoning": separator + text} if self._shows_reasoning else None
            case events.CallStart(call, name):
                self._have_called.add(index)
                self._separator(index, event)
                started = {
                    "index": call,
                    "id": call_id(self._request, self._arrival, index, call),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                return {"tool_calls": [started]}
            case events.CallArguments(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}

    def _separator(self, index: int, event: events.OutputEvent) -> str:
        """Returns the separator to send before the event's text if the event begins another part of
        a kind that the choice already has. Otherwise returns an empty text.
        """
        kinds = self._written.setdefault(index, [])
        if kinds and kinds[-1] is type(event):
            return ""
        is_another = type(event) in kinds
        if is_another:
            kinds.remove(type(event))
        kinds.append(type(event))
        return events.SEPARATOR if is_another else ""
