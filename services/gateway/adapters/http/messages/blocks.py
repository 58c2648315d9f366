"""Turns of a conversation and their blocks, as Anthropic's API writes them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.fields import Body, Ignored, Only, by_type, text_or_list

_NO_CITATIONS = "there are no citations"
_NO_CALLER = "only the model calls tools"
_NO_TOOLSETS = "toolsets are not supported"


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Annotated[Any, Only([], why=_NO_CITATIONS)] = None


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Annotated[Any, Only({"type": "direct"}, why=_NO_CALLER)] = None
    toolset_name: Annotated[Any, Only(why=_NO_TOOLSETS)] = None

    def to_template(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class ThinkingBlock(Body):
    """What the assistant thought. Whether the model reads it again depends on its chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


TextOrTextBlocks = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="alternative",
        custom_error_message="must be a string or a list of blocks",
    ),
]


class ToolResultBlock(Body):
    """What a tool gave. Chat templates have no place for `is_error`: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: TextOrTextBlocks | None = None
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: Annotated[Any, Only(why=_NO_TOOLSETS)] = None

    def to_template(self) -> dict[str, Any]:
        """The result as a turn of chat templates."""
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": text_of(self.content or ""),
        }


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")],
    Discriminator(
        by_type,
        custom_error_type="alternative",
        custom_error_message="must be an object whose type is text, tool_use, tool_result or "
        "thinking; images, documents and other blocks are not supported",
    ),
]
_BLOCKS_OF = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
}


class AnthropicMessage(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[_AnyBlock], Field(fail_fast=True), Tag("<list>")],
        Discriminator(
            text_or_list,
            custom_error_type="alternative",
            custom_error_message="must be a string or a list of blocks",
        ),
    ]

    def to_template(self, where: str) -> Iterator[dict[str, Any]]:
        """The turn as chat templates take it: each result of a tool is a turn of its own. Raises
        InvalidArgument, which says `where`, for blocks that another role has, or none.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        self._check(self.content, where)
        if self.role == "assistant":
            yield _assistant(self.content)
            return
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": self.role, "content": "".join(texts)}
                    texts = []
                yield block.to_template()
        if texts:
            yield {"role": self.role, "content": "".join(texts)}

    def _check(self, blocks: list[Block], where: str) -> None:
        field = f"{where}.content"
        if not blocks and self.role != "assistant":
            raise InvalidArgument(f"{field} must not be empty", field=field)
        for number, block in enumerate(blocks):
            if not isinstance(block, _BLOCKS_OF[self.role]):
                field = f"{field}[{number}]"
                raise InvalidArgument(
                    f"{field}: a turn of the {self.role} has no {block.type}", field=field
                )


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    calls = [block.to_template() for block in blocks if isinstance(block, ToolUseBlock)]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if calls:
        turn["tool_calls"] = calls
    if thought:
        turn["reasoning_content"] = thought
    return turn


def text_of(content: str | list[TextBlock]) -> str:
    """The text of blocks."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
