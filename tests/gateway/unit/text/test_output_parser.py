"""The incremental parser of models' answers. Its result does not depend on how text is split."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from services.gateway.core.text.parsing.catalog import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.core.text.parsing.events import ParsedMessage
from services.gateway.core.text.parsing.formats.harmony import open_message
from services.gateway.core.text.parsing.formats.schemas import is_json
from services.gateway.core.text.parsing.output_form import OutputForm
from tests.gateway.model_outputs import CALLS, RECORDED, SCHEMAS, Recorded

EVERY = pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: one.format)
_THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
_CALL = {"type": "function", "function": "{content}"}
# Descriptions of two formats for transformers' response parser, with which ours is compared.
TEMPLATES: dict[str, Any] = {
    "hermes": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": _CALL,
    },
    "qwen3_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"
        },
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}


def read(
    form: OutputForm, pieces: Sequence[str], *, is_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Parses a text that arrives in pieces. Returns its content, reasoning, and tool calls."""
    parser, message = form.make_parser(), ParsedMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish(is_cut=is_cut))
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls]


@EVERY
def test_an_answer_that_is_cut_off_has_no_part_of_a_name(recorded: Recorded) -> None:
    names = [name for name, _ in CALLS]
    for end in range(len(recorded.text)):
        _, _, calls = read(recorded.form, [recorded.text[:end]])
        assert [name for name, _ in calls] == names[: len(calls)]


@EVERY
def test_a_call_that_is_cut_off_does_not_look_complete(recorded: Recorded) -> None:
    for end in range(len(recorded.text)):
        _, _, calls = read(recorded.form, [recorded.text[:end]], is_cut=True)
        for (_, written), (_, arguments) in zip(calls, CALLS, strict=False):
            assert not is_json(written) or json.loads(written) == arguments


@EVERY
def test_a_recorded_answer_means_the_same_at_each_cut(recorded: Recorded) -> None:
    text = recorded.text
    whole = content, reasoning, calls = read(recorded.form, [text])
    assert (content, reasoning) == (recorded.content, recorded.reasoning)
    assert [(n, json.loads(a)) for n, a in calls] == (CALLS if recorded.calls else [])
    for at in range(1, len(text)):
        assert read(recorded.form, [text[:at], text[at:]]) == whole
    assert read(recorded.form, text) == whole  # each piece is one character


@EVERY
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_damaged_answer_means_the_same_in_any_pieces(recorded: Recorded, data: Any) -> None:
    text = recorded.text
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 12)))
    text = text[:start] + data.draw(st.text('<>{}[]"\\=n ', max_size=3)) + text[stop:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert read(recorded.form, pieces) == read(recorded.form, [text])


@pytest.mark.parametrize("recorded", [r for r in RECORDED if r.format in TEMPLATES])
def test_transformers_reads_the_same(recorded: Recorded) -> None:
    content_field = {"content": "text", "repeats": True, "join": ""}
    fields = {"content": content_field, "thinking": _THOUGHT}
    if recorded.calls:
        fields["tool_calls"] = TEMPLATES[recorded.format]
    template = {
        "defaults": {"role": "assistant"},
        "fields": fields,
        "start_anchor": "<|assistant|>",
    }
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    theirs = parse_response(recorded.text, template, prefix="<|assistant|>", tools=tools)
    content, reasoning, calls = read(recorded.form, [recorded.text])
    assert theirs.get("content", "") == content.strip()
    assert theirs.get("thinking", "") == reasoning
    functions = [call["function"] for call in theirs.get("tool_calls", [])]
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    assert [(f["name"], f["arguments"]) for f in functions] == parsed


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.text('<tool_call>[f(){}"\\a=1', max_size=80))
@example("hermes", '<tool_call>{"name": "f", "arguments": ')
@example("llama3_json", '{"name": "f"')
def test_any_text_is_read_without_an_error(name: str, text: str) -> None:
    form = OutputForm(tools=TOOL_FORMATS[name], schemas=SCHEMAS)
    assert read(form, text) == read(form, [text])


def test_arguments_come_while_they_are_written() -> None:
    parser = OutputForm(tools=TOOL_FORMATS["hermes"]).make_parser()
    assert not parser.feed('<tool_call>{"name": "f", "argu')
    events = [*parser.feed('ments": {"text": "once'), *parser.feed(" upon")]
    assert [getattr(event, "text", None) for event in events] == [None, '{"text": "once', " upon"]


IM = "<|im_end|>\n<|im_start|>assistant\n"
CLOSED, OPEN = "<think>\nab\n</think>\n\n", "<think>\nab"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "before", "turn", "state"),
    [
        ("qwen3", "hi" + IM, "", "ahead"),
        ("qwen3", "hi" + IM, "<think>\n", "inside"),
        ("qwen3", "hi" + IM, OPEN + " and more" * 100, "inside"),
        ("qwen3", "hi" + IM, "<think>\n\n</think>\n\n", "over"),
        ("qwen3", "hi" + IM, CLOSED + "The ans" * 100, "over"),
        ("qwen3", "hi" + IM, CLOSED + OPEN, "inside"),
        ("qwen3", CLOSED + "x" + IM, "", "ahead"),
        ("qwen3", "what does <think> mean?" + IM, "", "ahead"),
        ("deepseek_r1", "hi<｜Assistant｜>", "", "inside"),
        ("deepseek_r1", "hi<｜Assistant｜>", "<think>\n", "inside"),
        ("deepseek_r1", "hi<｜Assistant｜>", CLOSED + "The ans", "over"),
        ("deepseek_r1", CLOSED + "x<｜Assistant｜>", "", "ahead"),
        ("deepseek_r1", "what does <think> mean?<｜Assistant｜>", "", "inside"),
        ("mistral", "[THINK]a[/THINK]b[INST]c[/INST]", "[THINK]a", "inside"),
        ("mistral", "[INST]c[/INST]", "[THINK]a[/THINK]b", "over"),
        ("openai_gptoss", "hi<|end|><|start|>", "assistant", "ahead"),
        ("openai_gptoss", "hi<|end|><|start|>", f"assistant{ANALYSIS}hm", "inside"),
        ("openai_gptoss", "hi<|end|><|start|>", f"assistant{FINAL}The ans", "over"),
    ],
)
def test_the_last_mark_of_a_prompt_says_where_its_answer_begins(
    name: str, before: str, turn: str, state: str
) -> None:
    form = REASONING_FORMATS[name]
    assert form.state_after(before + turn, turn).value == state


def test_reasoning_that_the_prompt_began() -> None:
    form = OutputForm(reasoning=REASONING_FORMATS["qwen3"], begins_in_reasoning=True)
    assert read(form, ["hm\n</think>\n\nyes"]) == ("yes", "hm", [])
    assert read(form, ["cut short"]) == ("", "cut short", [])


MARKED = pytest.mark.parametrize(
    "recorded",
    [r for r in RECORDED if TOOL_FORMATS[r.format].starts and r.calls and not r.reasoning],
    ids=lambda one: one.format,
)


@MARKED
def test_calls_in_reasoning_that_never_ends_are_calls(recorded: Recorded) -> None:
    thinks = REASONING_FORMATS["qwen3"]
    tools = TOOL_FORMATS[recorded.format]
    form = OutputForm(tools=tools, schemas=SCHEMAS, reasoning=thinks, begins_in_reasoning=True)
    text = f"hm {recorded.text}"
    whole = content, reasoning, calls = read(form, [text])
    assert read(form, text) == whole
    assert (content, reasoning) == ("", f"hm {recorded.content}".rstrip())
    assert [(n, json.loads(a)) for n, a in calls] == CALLS


@MARKED
def test_calls_in_reasoning_that_ends_are_reasoning(recorded: Recorded) -> None:
    tools, thinks = TOOL_FORMATS[recorded.format], REASONING_FORMATS["qwen3"]
    form = OutputForm(tools=tools, schemas=SCHEMAS, reasoning=thinks)
    text = f"<think>hm {recorded.text} ?</think>Hi."
    assert read(form, text) == read(form, [text]) == ("Hi.", f"hm {recorded.text} ?", [])


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (f"<|start|>assistant{FINAL}The ans", "wer<|return|>", ("wer", "", [])),
        (f"<|start|>assistant{FINAL}The ", " ans", (" ans", "", [])),
        (f"<|start|>assistant{ANALYSIS}a ", f"b<|end|><|start|>assistant{FINAL}c", ("c", "b", [])),
        ("<|start|>assistant", f"{ANALYSIS}a<|end|><|start|>assistant{FINAL}b", ("b", "a", [])),
        (
            "<|start|>assistant",
            " to=functions.f<|channel|>commentary json<|message|>{}",
            ("", "", [("f", "{}")]),
        ),
    ],
)
def test_a_message_in_a_channel_that_the_prompt_began_goes_on(
    prompt: str, text: str, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    form = OutputForm(
        tools=TOOL_FORMATS["openai"], is_harmony=True, open_message=open_message(prompt)
    )
    assert read(form, [text]) == read(form, text) == expected


UNITS = ("<tool_call>", '{"name": "f", "arguments": {', "[", "<", '{"a":"\\', "[f(", " ", "<｜")


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_hostile_text_takes_time_in_proportion(name: str) -> None:
    form = OutputForm(tools=TOOL_FORMATS[name], schemas=SCHEMAS)
    for unit in UNITS:
        text = (unit * 20_000)[:20_000]
        began = time.process_time()
        read(form, [text[at : at + 2] for at in range(0, len(text), 2)])
        # A piece takes 3 to 10 microseconds. If each piece caused a scan of the whole text, it
        # would take a thousand times as long.
        assert time.process_time() - began < 2, (name, unit)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud800", "arguments": "[\"\udc00\"]"}</tool_call>'),
        ("pythonic", r'[f(a="\ud800")]'),
        ("qwen3_coder", r"<tool_call><function=f><parameter=a>['\ud800']</parameter></function>"),
    ],
)
def test_calls_have_no_half_of_a_surrogate_pair(name: str, text: str) -> None:
    schemas = {"f": {"properties": {"a": {"type": "array"}}}}
    [call] = read(OutputForm(TOOL_FORMATS[name], schemas), [text])[2]
    assert "\ufffd" in "".join(call)
    "".join(call).encode()


def test_calls_that_are_not_wanted_are_dropped() -> None:
    (harmony,) = [one for one in RECORDED if one.format == "openai"]
    form = OutputForm(is_harmony=True, reasoning=REASONING_FORMATS["openai_gptoss"])
    assert read(form, harmony.text) == ("I look.", "hm", [])
    form = OutputForm(tools=TOOL_FORMATS["hermes"], single_call=True)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read(form, call * 3) == ("", "", [("f", '{"a": 1}')])


REFERRED: dict[str, Any] = {
    "$defs": {
        "R": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "E": {"enum": [1, 2]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
        "Self": {"$ref": "#/$defs/Self"},
        "Resp[int]": {"type": "array"},
    },
    "definitions": {"S": {"type": "string"}},
}
R, NULL = {"$ref": "#/$defs/R"}, {"type": "null"}
VALUES: list[tuple[object, str, object]] = [
    (R, '{"x": 1}', {"x": 1}),
    ({"anyOf": [R, NULL]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [R, NULL]}, "null", None),
    ({"anyOf": [R, NULL]}, "None", None),
    ({"allOf": [R]}, '{"x": 1}', {"x": 1}),
    ({"oneOf": [{"anyOf": [{"allOf": [R]}]}, NULL]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"anyOf": [{"type": "object"}]}, {"type": "string"}]}, '{"x": 1}', {"x": 1}),
    ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
    ({"items": {}}, "[1]", [1]),
    ({}, '{"x": 1}', {"x": 1}),
    (True, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{}, NULL]}, '{"x": 1}', {"x": 1}),
    ({"title": "t", "default": None}, "[1, 2]", [1, 2]),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "1"]}, "1", "1"),
    ({"enum": [None, "a"]}, "null", None),
    ({"enum": [True]}, "true", True),
    ({"const": 1}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({"$ref": "#/$defs/E"}, "2", 2),
    ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "7", 7),
    ({"anyOf": [{"enum": ["7"]}, {"type": "integer"}]}, "7", "7"),
    ({"$ref": "#/definitions/S"}, "5", "5"),
    ({"$ref": "#/$defs/Resp[int]"}, "[1]", [1]),
    ({"$ref": "#/$defs/Resp%5Bint%5D"}, "[1]", [1]),
    ({"$ref": "#/properties/other"}, "5", 5),
    ({"$ref": "#/$defs/None"}, "x", "x"),
    ({"$ref": "#/$defs/Loop"}, "5", 5),
    ({"$ref": "#/$defs/Self"}, "x", "x"),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "1e3", 1000),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "integer"}, "02134", "02134"),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"minimum": 0}, "5", 5),
    ({"type": "string"}, "02134", "02134"),
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, '{"x": 1}', '{"x": 1}'),
    ({"type": "string"}, '"q"', '"q"'),
    ({"pattern": "^[0-9]+$"}, "5", "5"),
    ({"type": ["string", "null"]}, "02134", "02134"),
    ({"type": ["integer", "string"]}, "5", 5),
    ({"type": ["array", "null"]}, "[1]", [1]),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "integer"}, "true", "true"),
    ({"type": "object"}, '"{\\"x\\": 1}"', {"x": 1}),
    ({"type": "object"}, "{'x': True}", {"x": True}),
    ({"type": "object"}, '{"x": "a\nb"}', {"x": "a\nb"}),
    ({"type": "array"}, '{"x": 1}', '{"x": 1}'),
    ({"type": "object"}, "{x", "{x"),
    (False, "5", "5"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_value_between_tags_is_of_the_type_that_its_schema_resolves_to(
    schema: object, text: str, value: object
) -> None:
    tool = {"type": "object", "properties": {"v": schema, "other": {"type": "integer"}}, **REFERRED}
    written = f"<tool_call><function=f><parameter=v>\n{text}\n</parameter></function></tool_call>"
    form = OutputForm(tools=TOOL_FORMATS["qwen3_coder"], schemas={"f": tool})
    expected = {"v": value}
    for pieces in ([written], list(written)):
        _, _, [(_, arguments)] = read(form, pieces)
        found = json.loads(arguments)
        assert (found, type(found["v"])) == (expected, type(value))
    form = OutputForm(tools=TOOL_FORMATS["deepseek_v32"], schemas={"f": tool})
    written = f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="v">{text}</｜DSML｜parameter>'
    _, _, [(_, arguments)] = read(form, [written + "</｜DSML｜invoke>"])
    assert json.loads(arguments) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"v": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"v": {"type": "integer"}}}, {"properties": {"w": {}}}]},
        {"additionalProperties": {"type": "integer"}},
    ],
)
def test_a_parameter_is_found_where_the_schema_of_a_tool_has_it(schema: dict[str, Any]) -> None:
    form = OutputForm(tools=TOOL_FORMATS["qwen3_xml"], schemas={"f": schema})
    text = "<function=f><parameter=v>5</parameter></function>"
    assert read(form, [text]) == ("", "", [("f", '{"v": 5}')])


def test_a_schema_that_grows_without_an_end_is_read_in_a_bounded_time() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/W"}] * 1000}
    schema = {"properties": {"v": {"$ref": "#/$defs/W"}}, "$defs": {"W": wide}}
    form = OutputForm(tools=TOOL_FORMATS["qwen3_xml"], schemas={"f": schema})
    began = time.process_time()
    assert read(form, ["<function=f>" + "<parameter=v>5</parameter>" * 20 + "</function>"])
    assert time.process_time() - began < 1


CUT: list[tuple[str, list[tuple[str, Any]]]] = [
    ("<function=f><parameter=i>\n1\n<parameter=s>\nx\n</parameter></function>", []),
    ("<function=f><parameter=i>1<parameter=s>x</function>", []),
    ("<function=f\n<parameter=i>1</parameter><parameter=s>x</parameter></function>", []),
    (
        "<function=f><parameter=i>1</parameter><parameter=s>x</parameter></function>"
        "</tool_call><tool_call><function=g</function>",
        [("g", {})],
    ),
    ("<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\nx\n</tool_call>", []),
    ("<function=f><parameter=i>1</parameter><parameter=s>x<function=g></function>", [("g", {})]),
    (
        "<function=f><parameter=i>1</parameter><parameter=s>x</parameter></tool_call>"
        "<tool_call><function=g></function>",
        [("g", {})],
    ),
]


@pytest.mark.parametrize(("text", "others"), CUT)
def test_a_value_that_is_not_closed_ends_where_the_next_thing_begins(
    text: str, others: list[tuple[str, Any]]
) -> None:
    schema = {"properties": {"i": {"type": "integer"}, "s": {"type": "string"}}}
    form = OutputForm(tools=TOOL_FORMATS["qwen3_coder"], schemas={"f": schema})
    text = f"<tool_call>{text}</tool_call> ok"
    whole = content, _, calls = read(form, [text])
    assert read(form, text) == whole
    assert content == "ok"
    assert [(n, json.loads(a)) for n, a in calls] == [("f", {"i": 1, "s": "x"}), *others]


@pytest.mark.parametrize("value", ["a</function>b", "a</tool_call>", "</function>\n</tool_call>c"])
def test_a_value_may_contain_closing_tags_of_calls(value: str) -> None:
    form = OutputForm(tools=TOOL_FORMATS["qwen3_coder"])
    call = f"<tool_call><function=f><parameter=s>{value}</parameter></function></tool_call>"
    text = f"{call}{call} ok"
    whole = content, _, calls = read(form, [text])
    assert read(form, text) == whole
    assert content == "ok"
    assert [json.loads(arguments) for _, arguments in calls] == [{"s": value}] * 2
    cut = call.partition("</parameter>")[0]
    assert read(form, [cut], is_cut=True) == ("", "", [("f", "")])


F, G = [("f", {"i": 1})], [("f", {"i": 1}), ("g", {})]
CALL_F, CALL_G = '{"name": "f", "parameters": {"i": 1}}', '{"name": "g", "parameters": {}}'
OTHER = '{"name": "Bob", "parameters": {"i": 1}}'
ANYWHERE: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("llama3_json", f"Ok: {CALL_F}", "Ok:", F),
    ("llama3_json", f"Ok: {CALL_F}; {CALL_G} bye", "Ok:\nbye", G),
    ("llama3_json", f"[{CALL_F}, {CALL_G}]", "", G),
    ("llama3_json", f"Ok: [{CALL_F}]", "Ok:", F),
    ("llama3_json", f"a {{b}} [1] <i> {CALL_F}", "a {b} [1] <i>", F),
    ("llama3_json", f"<|python_tag|>{CALL_F}", "", F),
    ("llama3_json", OTHER, "", [("Bob", {"i": 1})]),
    ("llama3_json", f"Such as {OTHER}.", f"Such as {OTHER}.", []),
    ("llama3_json", f'{{"calls": [{CALL_F}]}}', f'{{"calls": [{CALL_F}]}}', []),
    ("llama3_json", "if (a[0] < b) { return; }", "if (a[0] < b) { return; }", []),
    ("llama4_json", f"<|python_start|>{CALL_F}<|python_end|>", "", F),
    ("llama4_json", f"Ok<|python_start|>[{CALL_F}, {CALL_G}]<|python_end|>bye", "Ok\nbye", G),
    ("pythonic", "Ok: [f(i=1), g()]", "Ok:", G),
    ("pythonic", "See [1] and [f(i=1)] and []", "See [1] and\nand []", F),
    ("pythonic", "Such as [h(i=1)].", "Such as [h(i=1)].", []),
    ("pythonic", "[h(i=1)]", "", [("h", {"i": 1})]),
    ("llama4_pythonic", "Ok <|python_start|>[f(i=1)]<|python_end|>", "Ok", F),
    ("mistral", '[TOOL_CALLS]f{"i": 1}[TOOL_CALLS]g{}', "", G),
    ("mistral", 'Ok[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]g{}', "Ok", G),
    ("mistral", "[TOOL_CALLS]f i[TOOL_CALLS]g i", "[TOOL_CALLS]f i[TOOL_CALLS]g i", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANYWHERE)
def test_a_call_is_found_where_it_stands_and_what_looks_like_one_is_content(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    form = OutputForm(tools=TOOL_FORMATS[name], schemas={"f": {}, "g": {}})
    whole = read(form, [text])
    assert read(form, text) == whole
    assert whole[0] == content
    assert [(n, json.loads(a)) for n, a in whole[2]] == calls
