"""Refuses requests for which the gateway wrote a grammar that cannot be compiled. The errors name
the fields of the client's request from which the grammar was written.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.schema_checks import held_schema
from services.common.request.structured_outputs import (
    FIELD,
    StructuredOutputs,
    StructuredOutputsKind,
)
from services.gateway.adapters.grammars.tool_calls import CallableTool, bare

Check = Callable[[StructuredOutputs], Awaitable[None]]
"""Raises InvalidArgument for a grammar that cannot be compiled."""
_PLACE = re.compile(r"^(grammar: )?(at \d+\(\d+\): )?")
_LINES = re.compile(r" \d+ \| .*", re.DOTALL)


async def check_written(
    grammar: StructuredOutputs,
    tools: Mapping[str, CallableTool],
    wanted: StructuredOutputs | None,
    check: Check,
) -> None:
    """Raises InvalidArgument if `grammar` cannot be compiled. It was written from the schemas of
    `tools`, whose keys are names of request fields, and from the client's constraint `wanted`.

    The error names the tool or the constraint that cannot be compiled alone. If each can be
    compiled alone, the error names all tools.
    """
    try:
        grammar.validate()
    except InvalidArgument as error:
        raise _of_all(error, tools) from error
    try:
        await check(grammar)
    except InvalidArgument as error:
        for field, tool in tools.items():
            schema = json.dumps(bare(tool.schema))
            try:
                await check(StructuredOutputs(StructuredOutputsKind.JSON, schema))
            except InvalidArgument as cause:
                raise _of_tool(cause, field, tool) from cause
        if wanted is not None:
            await check(wanted)
        raise _of_all(error, tools) from error


def check_schemas(tools: Mapping[str, CallableTool]) -> None:
    """Raises InvalidArgument if the schema of a tool cannot be enforced. The error names the tool's
    field.
    """
    for field, tool in tools.items():
        try:
            held_schema(bare(tool.schema))
        except InvalidArgument as error:
            raise _of_tool(error, field, tool) from error


def _of_tool(error: InvalidArgument, field: str, tool: CallableTool) -> InvalidArgument:
    why = _reason(error).removeprefix("json: ")
    return InvalidArgument(f"{field} of the tool {tool.name!r}: {why}", field=field)


def _of_all(error: InvalidArgument, tools: Mapping[str, Any]) -> InvalidArgument:
    field = "tools" if tools else FIELD
    what = "the schemas of all tools together" if tools else "this format together with reasoning"
    return InvalidArgument(f"{field}: {what} cannot be enforced: {_reason(error)}", field=field)


def _reason(error: InvalidArgument) -> str:
    """Returns the reason of an error. Positions in the grammar are removed, since the client did
    not write the grammar.
    """
    why = error.message.removeprefix(f"{FIELD}: ")
    return _LINES.sub("", _PLACE.sub("", why)).removeprefix("failed to compile JSON schema: ")
