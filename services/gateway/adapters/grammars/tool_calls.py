"""Writes grammars that force tool calls, or constrain the calls that a model decides to make."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.adapters.grammars.lark import (
    SPACE,
    Lark,
    make_lark,
    reasoning_literals,
    thought,
    wanted_rule,
)
from services.gateway.core.ports import Tokenizer
from services.gateway.core.text.parsing.catalog import Envelope
from services.gateway.core.text.parsing.reasoning import PromptedReasoning

_NOTES = frozenset({"title", "description", "examples", "$comment", "default", "deprecated"})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords of JSON Schema whose values map names to schemas. The mapped names are kept, even if a
name equals one of the keywords in _NOTES, which are removed.
"""
_VALUES = frozenset({"const", "enum"})
"""Keywords whose values are arbitrary JSON values, not schemas."""
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool's name and the schema of its arguments. If `strict` is true, the arguments must
    conform to the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


async def forced_calls(
    tools: Sequence[CallableTool],
    tokenizer: Tokenizer,
    reasoning: PromptedReasoning | None,
    *,
    parallel: bool,
) -> StructuredOutputs:
    """Returns a grammar for a JSON list of tool calls. If `parallel` is true, the list has at least
    one call. Otherwise it has exactly one.
    """
    lark = await make_lark(tokenizer, reasoning_literals(reasoning))
    calls = []
    for tool in tools:
        opened = lark.literal('{"name": ' + json.dumps(tool.name) + ', "parameters": ')
        calls.append(lark.rule(f'{opened} {lark.schema(bare(tool.schema))} "}}"'))
    call = lark.rule(" | ".join(calls))
    more = f'("," {SPACE} {call})*' if parallel else ""
    return lark.text(f'{thought(lark, reasoning)} "[" {call} {more} "]"')


async def strict_calls(
    tools: Sequence[CallableTool],
    envelope: Envelope,
    tokenizer: Tokenizer,
    reasoning: PromptedReasoning | None,
    *,
    parallel: bool,
) -> StructuredOutputs:
    """Returns a grammar for free text with calls in the model's own format. A call names one of the
    tools, and its arguments are an object. The arguments of a strict tool must conform to its
    schema.
    """
    lark = await _lark_of_calls(tools, envelope, tokenizer, reasoning)
    calls = _calls(lark, tools, envelope, after=envelope.trigger)
    call = lark.rule(f"{lark.text_to(envelope.trigger)} ({calls})")
    before = thought(lark, reasoning)
    rest = lark.text_without([envelope.trigger])
    return lark.text(f"{before} {call}{'*' if parallel else '?'} {rest}")


async def calls_or_form(
    tools: Sequence[CallableTool],
    envelope: Envelope,
    form: StructuredOutputs,
    tokenizer: Tokenizer,
    reasoning: PromptedReasoning | None,
    *,
    parallel: bool,
) -> StructuredOutputs:
    """Returns a grammar for either calls in the model's own format, without text around them, or a
    text that conforms to the client's constraint. Raises InvalidArgument if the constraint is a
    malformed grammar.
    """
    lark = await _lark_of_calls(tools, envelope, tokenizer, reasoning)
    call = lark.rule(f"({_calls(lark, tools, envelope)}) {SPACE}")
    before = thought(lark, reasoning)
    return lark.text(f"{before} ({call}{'+' if parallel else ''} | {wanted_rule(lark, form)})")


def bare(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without annotations, which would only make the grammar longer."""
    return {
        key: _bare_value(key, value, _MAX_DEPTH)
        for key, value in schema.items()
        if key not in _NOTES
    }


def _bare_value(key: str, value: Any, depth: int) -> Any:
    if depth == 0 or key in _VALUES:
        return value
    if isinstance(value, Mapping):
        return {
            name: _bare_value("" if key in _BY_NAME else name, inner, depth - 1)
            for name, inner in value.items()
            if key in _BY_NAME or name not in _NOTES
        }
    if isinstance(value, list):
        return [_bare_value("", inner, depth - 1) for inner in value]
    return value


async def _lark_of_calls(
    tools: Sequence[CallableTool],
    envelope: Envelope,
    tokenizer: Tokenizer,
    reasoning: PromptedReasoning | None,
) -> Lark:
    begins = [_begin(envelope, tool.name) for tool in tools]
    literals = [*begins, envelope.end, *reasoning_literals(reasoning)]
    return await make_lark(tokenizer, literals)


def _calls(lark: Lark, tools: Sequence[CallableTool], envelope: Envelope, after: str = "") -> str:
    """Returns alternatives that match a call of one of the tools. All calls begin with `after`,
    which another rule matches, so the alternatives omit it.
    """
    calls = []
    for tool in tools:
        opened = lark.literal(_begin(envelope, tool.name).removeprefix(after))
        schema = lark.schema(bare(tool.schema) if tool.strict else {"type": "object"})
        calls.append(lark.rule(f"{opened} {schema} {lark.literal(envelope.end)}"))
    return " | ".join(calls)


def _begin(envelope: Envelope, name: str) -> str:
    return envelope.begin.format(name=name, json_name=json.dumps(name))
