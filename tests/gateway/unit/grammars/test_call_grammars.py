"""The grammars that the gateway generates for tool calls, compiled as in the workers and checked
with texts. In some tokenizers a format's markers are single tokens, in others plain text.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from services.common.request.grammar_compiler import GrammarCompiler
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.gateway.adapters.grammars.lark import after_reasoning
from services.gateway.adapters.grammars.structural_tags import structural_tag
from services.gateway.adapters.grammars.tool_calls import (
    CallableTool,
    bare,
    calls_or_form,
    forced_calls,
    strict_calls,
)
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.text.parsing.catalog import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.core.text.parsing.reasoning import PromptedReasoning, ReasoningState

MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "description": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"A": {"type": "integer", "description": "a number"}},
}
TOOLS = [CallableTool("f", SCHEMA, strict=True), CallableTool("g", {"type": "object"})]
QWEN = REASONING_FORMATS["qwen3"]
# Pairs of reasoning text before the answer and the state of reasoning at the prompt's end.
REASONING: list[tuple[str, PromptedReasoning | None]] = [
    ("", None),
    ("hm</think>\n\n", PromptedReasoning(QWEN, ReasoningState.INSIDE)),
    ("<think>hm</think>\n", PromptedReasoning(QWEN, ReasoningState.AHEAD)),
    ("", PromptedReasoning(QWEN, ReasoningState.AHEAD)),
    ("", PromptedReasoning(QWEN, ReasoningState.OVER)),
]
THOUGHTS = pytest.mark.parametrize(("thought", "form"), REASONING)


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def tokenizer(request: pytest.FixtureRequest, model: Path) -> HfTokenizer:
    loaded = load_tokenizer(model)
    if request.param == "marks are tokens":
        loaded._backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return loaded


def check(
    tokenizer: HfTokenizer, form: StructuredOutputs, good: Sequence[str], bad: Sequence[str]
) -> None:
    """Asserts that the grammar accepts each good text as a whole and refuses each bad one."""
    size = tokenizer._backend.get_vocab_size()
    matcher = GrammarCompiler(tokenizer.to_json(), size, [0]).compile(form)
    for text in (*good, *bad):
        ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
        one = matcher.deep_copy()
        assert (one.consume_tokens(ids) and one.is_accepting()) == (text in good), text


@THOUGHTS
async def test_a_forced_call_is_a_list_of_calls_of_the_tools_and_one_where_they_are_not_parallel(
    tokenizer: HfTokenizer, thought: str, form: PromptedReasoning | None
) -> None:
    one = thought + '[{"name": "f", "parameters": {"a": 1}}]'
    two = thought + '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    wrong = [thought + '[{"name": "h", "parameters": {}}]', thought + "[]", thought + "x"]
    several = await forced_calls(TOOLS, tokenizer, form, parallel=True)
    check(tokenizer, several, [one, two], wrong)
    single = await forced_calls(TOOLS, tokenizer, form, parallel=False)
    check(tokenizer, single, [one], [two, *wrong])


@THOUGHTS
@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3", "deepseek_v31"])
async def test_strict_calls_have_a_tool_and_arguments_that_conform(
    tokenizer: HfTokenizer, thought: str, form: PromptedReasoning | None, name: str
) -> None:
    envelope = TOOL_FORMATS[name].envelope
    assert envelope is not None

    def call(tool: str, arguments: str) -> str:
        begin = envelope.begin.format(name=tool, json_name=json.dumps(tool))
        return begin + arguments + envelope.end

    grammar = await strict_calls(TOOLS, envelope, tokenizer, form, parallel=True)
    good = ["hello", "hi " + call("f", '{"a": 1}'), call("f", '{"a": 1}') + call("g", "{}") + "ok"]
    bad = [call("f", "{}"), call("h", "{}")]
    check(tokenizer, grammar, [thought + t for t in good], [thought + t for t in bad])


@THOUGHTS
async def test_calls_or_a_form(
    tokenizer: HfTokenizer, thought: str, form: PromptedReasoning | None
) -> None:
    envelope = TOOL_FORMATS["hermes"].envelope
    assert envelope is not None
    wanted = StructuredOutputs(StructuredOutputsKind.JSON, json.dumps(SCHEMA))
    grammar = await calls_or_form(TOOLS, envelope, wanted, tokenizer, form, parallel=True)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    good = ['{"a": 1}', call, f"{call}\n{call}"]
    bad = ["hi", "{}", call + '{"a": 1}', call.replace("1", '"1"')]
    check(tokenizer, grammar, [thought + t for t in good], [thought + t for t in bad])


FORMS = [
    (StructuredOutputsKind.JSON, json.dumps(SCHEMA), '{"a": 1}', "{}"),
    (StructuredOutputsKind.REGEX, r"(a|b)/c+\/", "a/cc/", "c"),
    (StructuredOutputsKind.CHOICE, '["x\\"y"]', 'x"y', "x"),
    (StructuredOutputsKind.GRAMMAR, 'start: "a" b\nb: "c" | "}"', "a}", "a"),
    (StructuredOutputsKind.GRAMMAR, 'root ::= "a" b\nb ::= "c"', "ac", "a"),
]


@pytest.mark.parametrize(("thought", "form"), REASONING[1:])
@pytest.mark.parametrize(("kind", "text", "good", "bad"), FORMS)
async def test_a_form_begins_where_reasoning_ends(
    tokenizer: HfTokenizer,
    thought: str,
    form: PromptedReasoning,
    kind: StructuredOutputsKind,
    text: str,
    good: str,
    bad: str,
) -> None:
    grammar = await after_reasoning(StructuredOutputs(kind, text), form, tokenizer)
    check(tokenizer, grammar, [thought + good], [thought + bad])


def _tag(begin: str, end: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {
            "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
            "triggers": ["<function="],
        },
        ["hi", 'a<function=f>{"a":1}</function> b'],
        ["<function=g>", "<function=f>{}</function>"],
    ),
    (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "A"},
                    {"type": "or", "elements": [{"type": "regex", "pattern": "b+"}, INTEGER]},
                ],
            }
        },
        ["Abb", "A12"],
        ["A", "B"],
    ),
    (
        {"format": _tag("<think>", "</think>", {"type": "any_text"})},
        ["<think>a b</think>"],
        ["<think>a", "<think>a</think>b"],
    ),
    (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [_tag("<a>", "</a>", INTEGER)],
                "separator": ",",
                "at_least_one": True,
            }
        },
        ["<a>1</a>", "<a>1</a>,<a>2</a>"],
        ["", "<a>1</a><a>2</a>"],
    ),
    (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<t>"],
                "tags": [_tag("<t>", "</t>", INTEGER)],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ["x<t>1</t>"],
        ["", "x", "<t>1</t>y"],
    ),
]


@pytest.mark.parametrize(("tag", "good", "bad"), TAGS)
async def test_a_structural_tag_accepts_its_texts_and_no_others(
    tokenizer: HfTokenizer, tag: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    check(tokenizer, await structural_tag(tag, tokenizer), good, bad)


def test_notes_are_left_out_and_properties_of_their_names_are_not() -> None:
    told = {"title": "T", **SCHEMA, "properties": {**SCHEMA["properties"], "title": {"enum": [1]}}}
    bared = bare(told)
    assert "title" not in bared
    assert set(bared["properties"]) == {"a", "description", "title"}
    assert bared["$defs"] == {"A": {"type": "integer"}}
