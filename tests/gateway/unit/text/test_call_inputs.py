"""Tool arguments in which the model made mistakes. Every API escapes them. In Anthropic's API they
are also repaired to a JSON object.
"""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from services.gateway.adapters.http.anthropic.input_json import InputWriter
from services.gateway.core.text.parsing.catalog import TOOL_FORMATS
from services.gateway.core.text.parsing.control_escaper import ControlEscaper
from services.gateway.core.text.parsing.events import ParsedMessage
from services.gateway.core.text.parsing.output_form import OutputForm

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PIECES = st.lists(
    st.sampled_from(
        [*"{}[],:\"\\ \n\x00/'é1-", '"a"', '"b": ', "\\u12", "\\ud83d", "\\ude00", "\\x"]
    ),
    max_size=24,
)


def written(pieces: list[str]) -> list[str]:
    writer = InputWriter()
    deltas = [delta for piece in pieces for delta in writer.feed(piece)]
    return [*deltas, *writer.end()]


def read(text: str) -> Any:
    return json.loads("".join(written([text])))


@pytest.mark.parametrize(
    ("arguments", "given_input"),
    [
        ("", {}),
        ("{}", {}),
        ("null", {}),
        ("[1, 2]", {}),
        ('"text"', {}),
        ("no JSON", {}),
        ('{"a": 1, "b": [true, null, {"c": "d"}]}', {"a": 1, "b": [True, None, {"c": "d"}]}),
        ('{"text": "one\ntwo\t"}', {"text": "one\ntwo\t"}),
        ('{"city": "Paris",}', {"city": "Paris"}),
        ('{"days": [1, 2,], "city": "Paris",,}', {"days": [1, 2], "city": "Paris"}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"re": "\\d+\\.", "x": "\\u12"}', {"re": "\\d+\\.", "x": "\\u12"}),
        (
            '{"a": True, "b": None, "c": NaN, "d": Rome}',
            {"a": True, "b": None, "c": "NaN", "d": "Rome"},
        ),
        ('{"a": 1e999, "b": -, "c": 007}', {"a": "1e999", "b": "-", "c": "007"}),
        ('{"a": "\\ud83d\\ude00", "b": "\\ud83d"}', {"a": "😀", "b": "\ufffd"}),
        # The arguments are cut off.
        ('{"city": "Par', {}),
        ('{"city": "Paris", "da', {"city": "Paris"}),
        ('{"city": "Paris", "days": ', {"city": "Paris"}),
        ('{"days": [2, 3, "ab', {"days": [2, 3]}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
        ('{"a": tru', {}),
        ('{"a": {', {"a": {}}),
        # From some character on, the arguments are not JSON and cannot be repaired.
        ('{"a": 1, b: 2}', {"a": 1}),
        ('{"a": 1, "b" 2}', {"a": 1}),
        ('{"a": <0, ...}>(), show', {}),
        ("{" * 2, {}),
    ],
)
def test_an_input_is_an_object_of_what_is_complete(arguments: str, given_input: Any) -> None:
    assert read(arguments) == given_input


def test_a_deep_input_ends_where_clients_cannot_read_on() -> None:
    levels, value = 0, read('{"a": ' * 9000)
    while value:
        levels, value = levels + 1, value["a"]
    assert levels == 99


@given(PIECES, st.booleans())
@example(['{"a": "', "x", '"', "\n,", '"b": ', "1", "}"], True)
@settings(deadline=None, max_examples=150)
def test_what_is_streamed_is_an_object_and_the_same_at_each_cut(
    pieces: list[str], begins: bool
) -> None:
    text = ("{" if begins else "") + "".join(pieces)
    streamed = written([*text])
    so_far = ""
    for delta in streamed:
        so_far += delta
        if so_far:
            from_json(so_far, allow_partial=True)  # as Anthropic's package parses deltas
    value = from_json(so_far)
    assert isinstance(value, dict)
    assert json.loads(so_far) == read(text) == value


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
@settings(deadline=None, max_examples=100)
def test_an_object_that_is_right_is_not_changed(value: dict[str, Any], in_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=in_ascii)
    assert read(text) == value
    escaper = ControlEscaper()
    assert "".join(map(escaper.feed, text)) == text


@given(st.text(st.characters(max_codepoint=0x2F, exclude_characters='"\\'), max_size=30))
def test_control_characters_in_strings_are_escaped_at_each_cut(text: str) -> None:
    raw = f'{{\n\t"a": "{text}", "b":\r\n "\\\\{text}\\"" }}'
    escaper = ControlEscaper()
    escaped = escaper.feed(raw)
    assert json.loads(escaped) == json.loads(raw, strict=False)
    escaper = ControlEscaper()
    assert "".join(map(escaper.feed, raw)) == escaped


def test_a_control_character_after_a_backslash_is_escaped_by_it() -> None:
    assert json.loads(ControlEscaper().feed('["a\\\nb\\\x01"]')) == ["a\nb\x01"]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v31"])
def test_every_format_of_json_escapes_them(name: str) -> None:
    call = '{"text": "one\ntwo", "n": 1}'
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {call}}}</tool_call>' * 2,
        "llama3_json": ";".join([f'{{"name": "f", "parameters": {call}}}'] * 2),
        "mistral": f"[TOOL_CALLS]f[ARGS]{call}" * 2,
        "deepseek_v31": "<｜tool▁calls▁begin｜>"
        + f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{call}<｜tool▁call▁end｜>" * 2
        + "<｜tool▁calls▁end｜>",
    }[name]
    for pieces in ([text], [*text]):
        parser, message = OutputForm(tools=TOOL_FORMATS[name]).make_parser(), ParsedMessage()
        for piece in pieces:
            message.add(parser.feed(piece))
        message.add(parser.finish())
        assert [json.loads(each.arguments) for each in message.calls] == [
            {"text": "one\ntwo", "n": 1}
        ] * 2
