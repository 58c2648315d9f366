"""The tools in request bodies: their definitions, earlier calls, and the choice of a tool."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.gateway.adapters.grammars.tool_calls import CallableTool
from services.gateway.adapters.http.exchange.fields import (
    Body,
    HistoryBody,
    JsonObject,
    Without,
    choice,
    text_or_object,
)
from services.gateway.adapters.http.openai.content_parts import Arguments, called_arguments

MAX_TOOLS = 512
TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,256}$"


DEFERRED = Without("tools.defer_loading", False)
"""Annotation of the field that marks tools which the model should find by a search. It has no
effect, because the prompt contains all tools.
"""


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the JSON schema of a tool's arguments. If the tool declares no parameters, no
    arguments are allowed.
    """
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


class FunctionBody(HistoryBody):
    """A function that the model may call. If it declares no parameters, it has no arguments."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, DEFERRED] = None

    @property
    def callable(self) -> CallableTool:
        return CallableTool(self.name, arguments_schema(self.parameters), bool(self.strict))

    def to_template(self) -> dict[str, Any]:
        shown = {"name", "description", "parameters"}
        function = self.model_dump(exclude_none=True, include=shown)
        return {"type": "function", "function": function}


class FunctionType(HistoryBody):
    """The type of tools that the client runs. Other tools are not supported."""

    type: Literal["function"]


class ToolBody(FunctionType):
    """A tool in the schema of chat completions."""

    function: FunctionBody
    defer_loading: Annotated[Any, DEFERRED] = None


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    """The function that must be called."""

    name: str = Field(max_length=256)


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<object>")],
    choice(text_or_object, "must be none, auto, required, or an object that names a function"),
]


class CalledFunction(HistoryBody):
    """The called function, with the arguments that the model wrote."""

    name: str
    arguments: Arguments | None = None


class ToolCallBody(HistoryBody):
    """A tool call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Returns the call for chat templates. Arguments that are no JSON object stay a text."""
        arguments = called_arguments(self.function.arguments)
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }
        return call if self.id is None else {"id": self.id, **call}


ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class ToolFields:
    """The paths of a tool's fields in the bodies of one API, for errors. {} is replaced by the path
    of the tool: an item of `places`, or if `places` is empty, the tool's index in brackets.
    """

    name: str
    schema: str
    strict: str
    places: Sequence[str] = ()

    def of(self, field: str, number: int) -> str:
        """The path of a field of the tool with the index `number`."""
        return field.format(self.places[number] if self.places else f"[{number}]")


CHAT_TOOLS = ToolFields(
    "tools{}.function.name", "tools{}.function.parameters", "tools{}.function.strict"
)


def check_tools(tools: Sequence[CallableTool], fields: ToolFields) -> None:
    """Raises InvalidArgument if two tools have the same name, or a schema is too large."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.name in names:
            where = fields.of(fields.name, number)
            raise InvalidArgument(f"{where}: there are two tools {tool.name!r}", field=where)
        names.add(tool.name)
        _check_schema(tool.schema, fields.of(fields.schema, number))


def _check_schema(schema: Mapping[str, Any], field: str) -> None:
    try:
        StructuredOutputs(StructuredOutputsKind.JSON, json.dumps(schema)).validate()
    except (InvalidArgument, RecursionError) as error:
        why = getattr(error, "message", "is nested too deep").partition("json ")[2]
        raise InvalidArgument(f"{field} {why or 'is nested too deep'}", field=field) from error
