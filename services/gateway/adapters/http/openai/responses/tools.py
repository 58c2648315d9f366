"""The tools of OpenAI's responses API, and the choice of a tool."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from services.gateway.adapters.http.exchange.fields import (
    Body,
    BodyNotes,
    HistoryBody,
    Only,
    by_type,
    choice,
    text_or_object,
)
from services.gateway.adapters.http.openai.responses.custom_input import INPUT_SCHEMA
from services.gateway.adapters.http.openai.tool_bodies import (
    DEFERRED,
    MAX_TOOLS,
    TOOL_NAME,
    FunctionBody,
    FunctionType,
)

_NOT_ASYNC = "the results of all tool calls must be in the next request"
_SEARCHES = ("web_search", "tool_search")


class _ClientTool(HistoryBody):
    """The fields of all tools that the client runs."""

    allowed_callers: Annotated[Any, Only(["direct"], why="only the model calls tools")] = None
    async_: Annotated[Any, Only(False, why=_NOT_ASYNC)] = Field(default=None, alias="async")


class ResponsesTool(FunctionBody, _ClientTool, FunctionType):
    """A function that the client runs. The field `type` is checked first."""

    output_schema: Annotated[Any, Only(why="this server does not check the results of tools")] = (
        None
    )


class CustomFormat(Body):
    """The format of a custom tool's input. The input is not constrained by the grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


def _note_grammar(form: CustomFormat, info: ValidationInfo) -> CustomFormat:
    if form.type == "grammar" and isinstance(info.context, BodyNotes):
        info.context.ignored.append("tools.format")
    return form


class CustomTool(_ClientTool):
    """A tool that the client runs, whose input is a text. As in vLLM, the prompt describes it as a
    function with one argument.
    """

    type: Literal["custom"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: Annotated[CustomFormat, AfterValidator(_note_grammar)] | None = None
    defer_loading: Annotated[Any, DEFERRED] = None

    @property
    def function(self) -> ResponsesTool:
        """The function that the prompt describes. Its description contains the input's grammar."""
        texts = [self.description] if self.description else []
        if self.format is not None and self.format.definition is not None:
            texts.append(f"The text must conform to this grammar:\n{self.format.definition}")
        return ResponsesTool(
            type="function",
            name=self.name,
            description="\n\n".join(texts) or None,
            parameters=INPUT_SCHEMA,
        )


class ResponsesNamespace(Body):
    """A namespace of functions. Codex sends some of its tools in namespaces."""

    type: Literal["namespace"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _kind(tool: Any) -> str:
    kind = by_type(tool)
    return kind if kind in ("<namespace>", "<custom>") else "<function>"


_Tool = ResponsesTool | CustomTool | ResponsesNamespace
AnyTool = Annotated[
    Annotated[ResponsesTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[ResponsesNamespace, Tag("<namespace>")],
    choice(_kind, "must be an object whose type is function, custom or namespace"),
]


def _unless_search(
    tool: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> _Tool | None:
    """Validates a tool. Returns None for a web search, which OpenAI would run, and for a tool
    search, because the prompt contains all tools. Codex sends both by default, so they are ignored
    instead of refused. A header of the answer lists them.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    kind = kind if isinstance(kind, str) else ""
    search = next((name for name in _SEARCHES if kind.startswith(name)), None)
    if search is None:
        return cast("_Tool", validate(tool))
    if isinstance(info.context, BodyNotes):
        info.context.ignored.append(f"tools.{search}")
    return None


def functions_of(
    tools: Sequence[_Tool | None] | None,
) -> list[tuple[str, str | None, ResponsesTool]]:
    """Returns each function's path, such as `[0].tools[1]`, its namespace, and the function."""
    found: list[tuple[str, str | None, ResponsesTool]] = []
    for number, tool in enumerate(tools or ()):
        if isinstance(tool, ResponsesTool):
            found.append((f"[{number}]", None, tool))
        elif isinstance(tool, CustomTool):
            found.append((f"[{number}]", None, tool.function))
        elif tool is not None:
            inner = enumerate(tool.tools)
            found += [(f"[{number}].tools[{place}]", tool.name, one) for place, one in inner]
    return found


def _few(tools: list[_Tool | None]) -> list[_Tool | None]:
    if len(functions_of(tools)) > MAX_TOOLS:
        why = f"must have at most {MAX_TOOLS} functions"
        raise PydanticCustomError("too_long", "{why}", {"why": why})
    return tools


ResponsesTools = Annotated[
    list[Annotated[AnyTool, WrapValidator(_unless_search)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(_few),
]
"""Tools. None stands for an ignored web search or tool search."""


class ResponsesNamedTool(Body):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str = Field(max_length=256)


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[ResponsesNamedTool, Tag("<object>")],
    choice(text_or_object, "must be none, auto, required, or an object that names a tool"),
]
