"""The turns of a conversation and their blocks, in Anthropic's schema."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.exchange.cache_wishes import MarkedBody
from services.gateway.adapters.http.exchange.fields import (
    HistoryBody,
    by_type,
    choice,
    text_or_list,
)
from services.gateway.adapters.http.openai.content_parts import (
    THOUGHTS,
    Arguments,
    TextPart,
    TextType,
    called_arguments,
    said,
    thought,
    without_media,
)


class ToolUseBlock(MarkedBody):
    """A tool call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments | None = None

    def to_template(self) -> dict[str, Any]:
        """Returns the call as chat templates expect it. An input that is no JSON object is a
        text.
        """
        function = {"name": self.name, "arguments": called_arguments(self.input)}
        return {"id": self.id, "type": "function", "function": function}


class RedactedThinkingBlock(HistoryBody):
    """Encrypted thinking. This server cannot read it."""

    type: Literal["redacted_thinking"]


class ToolReferenceBlock(HistoryBody):
    """A tool that a tool search found. Only the tool's name is rendered, because the prompt has the
    schemas of all tools.
    """

    type: Literal["tool_reference"]
    tool_name: str


def _refuse(_block: Any) -> None:
    raise PydanticCustomError("not_supported", "{why}", {"why": "this server reads text only"})


_Media = Annotated[Any, AfterValidator(_refuse)]
"""An image or a document, which is refused. In the error's path, the block's type follows the
block's index, as in Anthropic's API. Claude Code then removes the block and sends the rest again.
"""
_TEXT_TAGS = frozenset(f"<{name}>" for name in get_args(TextType))


def _kind(value: Any) -> str | None:
    tag = by_type(value)
    return "<text>" if tag in _TEXT_TAGS else tag


def _kind_with_media(value: Any) -> str | None:
    """Like `_kind`. The tag of `_Media` has no brackets, so that errors contain it in the path."""
    tag = _kind(value)
    return tag.strip("<>") if tag in ("<image>", "<document>") else tag


_ResultBlock = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    choice(
        _kind,
        "must be an object whose type is text or tool_reference; other blocks are not supported",
    ),
]


def _result_text(block: TextPart | ToolReferenceBlock) -> str:
    return block.text if isinstance(block, TextPart) else block.tool_name


class ToolResultBlock(MarkedBody):
    """The result of a tool call. `is_error` is ignored, because chat templates have no such field,
    and the content describes the error.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[
                list[_ResultBlock],
                Field(fail_fast=True),
                BeforeValidator(without_media),
                Tag("<list>"),
            ],
            choice(text_or_list, "must be a string or a list of blocks"),
        ]
        | None
    ) = None

    def to_template(self) -> dict[str, Any]:
        """Returns the result as a turn for chat templates."""
        blocks = self.content or ""
        texts = [blocks] if isinstance(blocks, str) else [_result_text(one) for one in blocks]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": texts}


Block = TextPart | ToolUseBlock | ToolResultBlock | RedactedThinkingBlock
_AnyBlock = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[_Media, Tag("image")]
    | Annotated[_Media, Tag("document")],
    choice(
        _kind_with_media,
        "must be an object whose type is text, tool_use, tool_result or "
        "thinking; other blocks are not supported",
    ),
]
_BLOCKS_OF = {
    "system": (TextPart,),
    "user": (TextPart, ToolResultBlock),
    "assistant": (TextPart, ToolUseBlock, RedactedThinkingBlock),
}
_ROLES = {"ctx": "user", "msg": "user"}
"""Maps role names that Claude Code sends to the roles of chat templates."""


def _as_role(value: Any) -> Any:
    return _ROLES.get(value, value) if isinstance(value, str) else value


class AnthropicMessage(HistoryBody):
    """One turn of a conversation."""

    role: Annotated[Literal["user", "assistant", "system"], BeforeValidator(_as_role)]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[_AnyBlock], Field(fail_fast=True), Tag("<list>")],
            choice(text_or_list, "must be a string or a list of blocks"),
        ]
        | None
    ) = None

    def to_template(self, where: str) -> Iterator[dict[str, Any]]:
        """Yields the turns as chat templates expect them. Each tool result is a separate turn.
        Raises InvalidArgument for blocks that the message's role cannot have. `where` is the path
        of the message in the error.
        """
        if not self.content or isinstance(self.content, str):
            yield {"role": self.role, "content": [self.content or ""]}
            return
        self._check(self.content, where)
        if self.role == "assistant":
            yield _assistant(self.content)
            return
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextPart):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": self.role, "content": texts}
                    texts = []
                yield block.to_template()
        if texts:
            yield {"role": self.role, "content": texts}

    def _check(self, blocks: Sequence[Block], where: str) -> None:
        for number, block in enumerate(blocks):
            is_thought = block.type in THOUGHTS and self.role != "assistant"
            if is_thought or not isinstance(block, _BLOCKS_OF[self.role]):
                field = f"{where}.content[{number}]"
                raise InvalidArgument(
                    f"{field}: a turn of the {self.role} has no {block.type}", field=field
                )


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    parts = [block for block in blocks if isinstance(block, TextPart)]
    turn: dict[str, Any] = {"role": "assistant", "content": said(parts)}
    calls = [block.to_template() for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = calls
    if thoughts := thought(parts):
        turn["reasoning_content"] = thoughts
    return turn
