"""The items of a conversation, as OpenAI's responses API writes them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from services.gateway.adapters.http.fields import Body, Ignored, Only, by_type, text_or_list
from services.gateway.adapters.http.tool_bodies import arguments_object

NOT_ASYNC = "a call is answered before the next response"
_NO_CALLER = "only the model calls tools"


class InputText(Body):
    """Text that the model read or wrote."""

    type: Literal["input_text", "output_text"]
    text: str
    # An answer may be sent back as it came.
    annotations: Annotated[Any, Only([], why="there are no annotations")] = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


TextOrTextParts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputText], Field(fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="alternative",
        custom_error_message="must be a string or a list of parts",
    ),
]


class MessageItem(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrTextParts
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None

    def to_template(self, _where: str) -> dict[str, Any]:
        return {"role": self.role, "content": text_of(self.content)}


class FunctionCallItem(Body):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Annotated[Any, Only({"type": "direct"}, why=_NO_CALLER)] = None
    namespace: Annotated[Any, Only(why="tools have no namespaces")] = None
    async_: Annotated[Any, Only(False, why=NOT_ASYNC)] = Field(default=None, alias="async")

    def to_template(self, where: str) -> dict[str, Any]:
        """A turn of the assistant. Raises InvalidArgument, which says `where`, for arguments that
        are no object.
        """
        arguments = arguments_object(self.arguments, f"{where}.arguments")
        function = {"name": self.name, "arguments": arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionCallOutputItem(Body):
    """What a tool gave."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: TextOrTextParts
    id: Ignored = None
    status: Ignored = None
    caller: Annotated[Any, Only({"type": "direct"}, why=_NO_CALLER)] = None

    def to_template(self, _where: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


class ReasoningText(Body):
    """What the assistant thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the assistant thought. Whether the model reads it again depends on its chat template."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: Annotated[Any, Only([], why="reasoning is not summarized")] = None
    encrypted_content: Annotated[Any, Only(why="reasoning is not encrypted")] = None
    id: Ignored = None
    status: Ignored = None

    def to_template(self, _where: str) -> dict[str, Any]:
        thought = "".join(part.text for part in self.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": thought}


def _kind(value: Any) -> str | None:
    if isinstance(value, dict) and value.get("type") is None:
        return "<message>"
    return by_type(value)


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
AnyItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind,
        custom_error_type="alternative",
        custom_error_message="must be an object whose type is message, function_call, "
        "function_call_output or reasoning; other items are not supported",
    ),
]


def text_of(content: str | list[InputText]) -> str:
    """The text of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def turns_of(items: list[Item]) -> list[dict[str, Any]]:
    """The items as turns of chat templates: what the assistant thought, then said, then called is
    one turn. Raises InvalidArgument for arguments of calls that are no object.
    """
    turns: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        turn = item.to_template(f"input[{number}]")
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
    """How far a turn of the assistant is: it thinks, speaks, calls."""
    return 2 if "tool_calls" in turn else 1 if turn["content"] else 0


def _extend(last: dict[str, Any], turn: dict[str, Any]) -> None:
    last["content"] += turn["content"]
    if "tool_calls" in turn:
        last.setdefault("tool_calls", []).extend(turn["tool_calls"])
