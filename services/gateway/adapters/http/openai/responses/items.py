"""The items of a conversation, in the schema of OpenAI's responses API."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Tag
from pydantic_core import PydanticCustomError

from services.gateway.adapters.http.exchange.fields import HistoryBody, by_type, choice
from services.gateway.adapters.http.openai.content_parts import (
    Arguments,
    Result,
    TextOrParts,
    called_arguments,
    read,
    said,
    thought,
)
from services.gateway.adapters.http.openai.responses.custom_input import INPUT


class MessageItem(HistoryBody):
    """A message in the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts | None = None

    def to_template(self) -> dict[str, Any]:
        """Returns the item as a turn for chat templates. Parts with a thought's type become
        reasoning if the turn is the assistant's, and otherwise ordinary text.
        """
        if self.role != "assistant":
            return {"role": self.role, "content": read(self.content)}
        turn: dict[str, Any] = {"role": self.role, "content": said(self.content)}
        if thoughts := thought(self.content):
            turn["reasoning_content"] = thoughts
        return turn


def whole_name(namespace: str | None, name: str) -> str:
    """A tool's name in the prompt: as in vLLM, `namespace__name` if the tool has a namespace."""
    return f"{namespace}__{name}" if namespace else name


class FunctionCallItem(HistoryBody):
    """A tool call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments | None = None

    def to_template(self) -> dict[str, Any]:
        return _call(self.call_id, self.namespace, self.name, called_arguments(self.arguments))


class CustomToolCallItem(HistoryBody):
    """A call of a custom tool that the assistant made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str | None = None

    def to_template(self) -> dict[str, Any]:
        return _call(self.call_id, self.namespace, self.name, {INPUT: self.input or ""})


def _call(
    call_id: str, namespace: str | None, name: str, arguments: dict[str, Any] | str
) -> dict[str, Any]:
    """Returns a call as a turn of the assistant."""
    function = {"name": whole_name(namespace, name), "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": [], "tool_calls": [call]}


class FunctionCallOutputItem(HistoryBody):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Result = None

    def to_template(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": read(self.output)}


class ReasoningItem(HistoryBody):
    """The assistant's reasoning, or a summary of the reasoning. The chat template decides whether
    the prompt contains it. This server cannot read encrypted reasoning.
    """

    type: Literal["reasoning"]
    content: TextOrParts | None = None
    summary: TextOrParts | None = None

    def to_template(self) -> dict[str, Any]:
        """Returns the item as a turn of the assistant without content."""
        parts = self.content or self.summary
        return {"role": "assistant", "content": [], "reasoning_content": "".join(read(parts))}


def _refuse(_reference: Any) -> None:
    why = "this server stores no items; send the items, as clients do if store is false"
    raise PydanticCustomError("not_supported", "{why}", {"why": why})


def _kind(value: Any) -> str | None:
    if isinstance(value, dict) and value.get("type") is None:
        return "<message>"
    return by_type(value)


Item = MessageItem | FunctionCallItem | CustomToolCallItem | FunctionCallOutputItem | ReasoningItem
AnyItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[FunctionCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[Any, AfterValidator(_refuse), Tag("<item_reference>")],
    choice(
        _kind,
        "must be an object whose type is message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output or reasoning; other items are not supported",
    ),
]


def turns_of(items: list[Item]) -> list[dict[str, Any]]:
    """Converts the items to turns for chat templates. Consecutive items of the assistant become
    one turn if they are in the order reasoning, message, function calls.
    """
    turns: list[dict[str, Any]] = []
    for item in items:
        turn = item.to_template()
        if turns and _goes_on(turns[-1], turn):
            _extend(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def _goes_on(last: dict[str, Any], turn: dict[str, Any]) -> bool:
    if not last["role"] == turn["role"] == "assistant":
        return False
    return _stage(turn) > _stage(last) or "tool_calls" in turn


def _stage(turn: dict[str, Any]) -> int:
    """Returns what an assistant's turn has last: 0 for reasoning, 1 for content, 2 for calls."""
    return 2 if "tool_calls" in turn else 1 if any(turn["content"]) else 0


def _extend(last: dict[str, Any], turn: dict[str, Any]) -> None:
    last["content"] += turn["content"]
    if thoughts := turn.get("reasoning_content"):
        last["reasoning_content"] = last.get("reasoning_content", "") + thoughts
    if "tool_calls" in turn:
        last.setdefault("tool_calls", []).extend(turn["tool_calls"])
