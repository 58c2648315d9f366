"""Conversations that clients send back, with our messages and the fields that packages add."""

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.exchange.parse import parse_body
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody
from services.gateway.adapters.http.openai.rendering import render_turns
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.responses.items import turns_of
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from tests.gateway.tiny_tokenizer import write_tokenizer
from tests.slowness import slowness


def joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**turn, "content": "\n".join(turn["content"])} for turn in turns]


def chat(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    raw = json.dumps({"messages": turns}).encode()
    body, ignored = parse_body(raw, ChatCompletionBody, ignores_unknown=False)
    assert ignored == ()
    return joined(turn.to_template(f"messages[{at}]") for at, turn in enumerate(body.messages))


def responses(*items: dict[str, Any]) -> list[dict[str, Any]]:
    raw = json.dumps({"input": items}).encode()
    body, ignored = parse_body(raw, ResponsesBody, ignores_unknown=False)
    assert ignored == ()
    assert not isinstance(body.input, str)
    return joined(turns_of(body.input))


def messages(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    raw = json.dumps({"messages": turns, "max_tokens": 1, **fields}).encode()
    body, ignored = parse_body(raw, MessagesBody, ignores_unknown=False)
    assert ignored == ()
    return joined(
        made for at, turn in enumerate(body.messages) for made in turn.to_template(f"{at}")
    )


def called(arguments: object, **added: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments, **added}
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}


SAID = {"role": "assistant", "content": "yes"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    "added",
    [
        {"parsed": {"a": 1}, "refusal": None, "annotations": []},
        {"anything": {"at": ["all"]}, "id": "m1", "logprobs": None, "audio": None},
        {"provider_specific_fields": {}, "thinking_blocks": [], "reasoning_items": None},
        {"tool_calls": [], "function_call": None},
        {"tool_calls": None, "images": [], "finish_reason": "stop"},
    ],
)
def test_other_keys_of_a_turn_change_nothing(added: dict[str, Any]) -> None:
    assert chat({**SAID, **added}) == [SAID]


def test_other_keys_of_calls_and_parts_change_nothing() -> None:
    call = {**CALL, "index": 0, "extra_content": {"google": {}}}
    call["function"] = {"name": "f", "arguments": "{}", "parsed_arguments": {}, "x": 1}
    [turn] = chat({"role": "assistant", "content": "", "tool_calls": [call]})
    assert turn["tool_calls"] == [CALL]
    part = {"type": "text", "text": "hi", "annotations": [{}], "prompt_cache_breakpoint": {}}
    assert chat({"role": "user", "content": [part]}) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_turn_without_content_has_an_empty_one(role: str, content: dict[str, Any]) -> None:
    assert chat({"role": role, **content}) == [{"role": role, "content": ""}]


def test_a_refusal_is_what_was_said_in_place_of_a_content() -> None:
    assert chat({"role": "assistant", "content": None, "refusal": "no"}) == [
        {"role": "assistant", "content": "no"}
    ]
    assert chat({**SAID, "refusal": "no"}) == [SAID]


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        (None, {}),
        ("", {}),
        ("null", {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        ('{"city": "Par', '{"city": "Par'),
        ('{"city": "Paris",}', '{"city": "Paris",}'),
        ("[1, 2]", "[1, 2]"),
        ("7", "7"),
        ("no JSON", "no JSON"),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ("[" * 9000, "[" * 9000),
        (f'{{"a": {"1" * 9000}}}', f'{{"a": {"1" * 9000}}}'),
    ],
)
def test_arguments_are_an_object_or_the_text_that_was_written(
    arguments: object, rendered: object
) -> None:
    [turn] = chat(called(arguments))
    assert turn["tool_calls"][0]["function"]["arguments"] == rendered
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    [turn] = responses(item)
    assert turn["tool_calls"][0]["function"]["arguments"] == rendered
    block = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
    [turn] = messages({"role": "assistant", "content": [block]})
    assert turn["tool_calls"][0]["function"]["arguments"] == rendered


TEXTS = [
    {"type": "text", "text": "a"},
    {"type": "input_text", "text": "a"},
    {"type": "output_text", "text": "a", "annotations": [{"x": 1}], "logprobs": [], "parsed": None},
    {"type": "refusal", "refusal": "a"},
]
THOUGHTS = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True},
    {"type": "reasoning_text", "text": "hm"},
    {"type": "summary_text", "text": "hm"},
]


@pytest.mark.parametrize("part", TEXTS)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_parts_of_every_api_are_text_in_all_of_them(role: str, part: dict[str, Any]) -> None:
    turn = {"role": role, "content": [part]}
    for read in (chat, responses, messages):
        assert read(turn) == [{"role": role, "content": "a"}]


@pytest.mark.parametrize("part", THOUGHTS)
def test_thoughts_are_the_assistants_in_all_apis(part: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": [part, {"type": "text", "text": "a"}]}
    for read in (chat, responses, messages):
        assert read(turn) == [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    for read in (chat, responses):
        turn = {"role": "user", "content": [part]}
        assert read(turn) == [{"role": "user", "content": "hm"}]


def test_a_text_may_stand_for_a_part() -> None:
    [turn] = chat({"role": "user", "content": ["a", {"type": "text", "text": "b"}]})
    assert turn["content"].split() in (["ab"], ["a", "b"])


def test_a_part_that_is_no_text_is_named() -> None:
    with pytest.raises(InvalidArgument, match="input should be 'text'") as error:
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    assert error.value.field == "messages[0].content[0].type"


def test_items_of_a_response_that_was_cut() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "status": "incomplete"}
    text = [{"type": "reasoning_text", "text": "hm"}]
    assert responses({**thought, "content": text, "encrypted_content": "x"}) == [
        {"role": "assistant", "content": "", "reasoning_content": "hm"}
    ]
    summary = [{"type": "summary_text", "text": "hm"}]
    assert responses({**thought, "content": None, "summary": summary}, SAID) == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    ]
    message = {"type": "message", "role": "assistant", "id": "m", "status": "incomplete"}
    assert responses({**message, "content": []}) == [{"role": "assistant", "content": ""}]
    result = {"type": "function_call_output", "call_id": "a", "output": None, "namespace": "n"}
    assert responses(result)[0]["content"] == ""


def test_a_document_that_a_tool_returned_may_be_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "notes"}
    result = {"type": "tool_result", "tool_use_id": "a"}
    document = {"type": "document", "source": source, "title": "a.txt"}
    (turn,) = messages({"role": "user", "content": [{**result, "content": [document]}]})
    assert turn["content"] == "notes"


def test_an_empty_namespace_is_none() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    assert responses({**call, "namespace": ""}) == responses(call)


def test_blocks_that_agents_send_back() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a", "citations": [{}], "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": {"type": "x"}},
    ]
    [turn] = messages({"role": "assistant", "content": blocks, "id": "m"})
    assert (turn["content"], turn["tool_calls"]) == ("a", [CALL])
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found], "is_error": False}
    assert messages({"role": "user", "content": [result]})[0]["content"] == "weather"
    assert messages({"role": "msg", "content": None}) == [{"role": "user", "content": ""}]


# How models' chat templates write the arguments of tool calls: Qwen 3 as text or JSON, Llama as
# JSON, GLM key by key, DeepSeek by concatenating texts. The last template writes no calls.
_EACH = (
    "{% for m in messages %}{% for c in m.tool_calls or () %}{% set a = c.function.arguments %}"
    "<%s>{% endfor %}{{ m.content }}{% endfor %}"
)
TEMPLATES = {
    "either": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "json": "{{ a | tojson }}",
    "keys": "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
    "mapping": "{% if a is mapping %}{% for k in a %}{{ k }}={{ a[k] }};{% endfor %}{% endif %}",
    "text": "{{ '```' + a + '```' }}",
    "nothing": "",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("template", "arguments", "prompt"),
    [
        ("either", '{"a": 1}', '<{"a": 1}>'),
        ("either", '{"a": "é', '<{"a": "é>'),
        ("json", '{"a": 1}', '<{"a": 1}>'),
        ("json", '{"a": "é', '<"{\\"a\\": \\"é">'),
        ("keys", '{"a": 1}', "<a=1;>"),
        ("keys", '{"a": "é', '<arguments={"a": "é;>'),
        ("mapping", '{"a": "é', '<arguments={"a": "é;>'),
        ("text", '{"a": 1}', '<```{"a": 1}```>'),
        ("text", '{"a": "é', '<```{"a": "é```>'),
        ("nothing", '{"a": "é', "<>"),
    ],
)
async def test_no_argument_is_lost_in_a_template(
    tokenizer: HfTokenizer, template: str, arguments: str, prompt: str
) -> None:
    tokenizer._tokenizer.chat_template = _EACH.replace("%s", TEMPLATES[template])
    rendered = await render_turns(
        tokenizer,
        chat(called(arguments)),
        add_generation_prompt=False,
        continue_final_message=False,
        variables={},
    )
    assert rendered == prompt


@pytest.mark.parametrize(("text", "num_calls"), [("", 20_000), ("xy" * 1_900_000, 32)])
async def test_calls_are_rendered_and_looked_for_in_another_thread(
    tokenizer: HfTokenizer, text: str, num_calls: int
) -> None:
    tokenizer._tokenizer.chat_template = _EACH.replace("%s", TEMPLATES["either"])
    [turn] = chat(called("xyxyxyxyxyxyz"))
    turns = [
        {"role": "user", "content": text},
        {**turn, "tool_calls": turn["tool_calls"] * num_calls},
    ]
    began = time.thread_time()
    await render_turns(
        tokenizer,
        turns,
        add_generation_prompt=False,
        continue_final_message=False,
        variables={},
    )
    assert time.thread_time() - began < 0.02 * slowness()


# How models' chat templates write a developer's turn: as any role, not at all (Qwen), and not with
# an error (Mistral).
ROLES = {
    "any": "{{ m.role }}:{{ m.content }};",
    "some": "{% if m.role in ('system', 'user') %}{{ m.role }}:{{ m.content }};{% endif %}",
    "others are refused": "{% if m.role not in ('system', 'user') %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};",
}


@pytest.mark.parametrize(
    ("template", "role"),
    [("any", "developer"), ("some", "system"), ("others are refused", "system")],
)
async def test_what_the_developer_said_is_in_the_prompt(
    tokenizer: HfTokenizer, template: str, role: str
) -> None:
    body = "{% for m in messages %}" + ROLES[template] + "{% endfor %}"
    tokenizer._tokenizer.chat_template = body
    said = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}]
    rendered = await render_turns(
        tokenizer,
        said,
        add_generation_prompt=False,
        continue_final_message=False,
        variables={},
    )
    assert rendered == f"{role}:Be short.;user:hi;"


# Qwen 3.5's templates refuse a system turn that is not the first turn.
_FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_system_turns_that_a_template_refuses_are_in_the_first_turn(
    tokenizer: HfTokenizer, role: str
) -> None:
    body = "{% for m in messages %}" + _FIRST + ROLES["others are refused"] + "{% endfor %}"
    tokenizer._tokenizer.chat_template = body
    user = {"role": "user", "content": "hi"}
    for first in ([], [{"role": "system", "content": ["a", "b"]}]):
        rendered = await render_turns(
            tokenizer,
            [*first, user, {"role": role, "content": "Be short."}, user],
            add_generation_prompt=False,
            continue_final_message=False,
            variables={},
        )
        start = "a\nb\n" if first else ""
        assert rendered == f"system:{start}Be short.;user:hi;user:hi;"


async def test_the_first_error_of_a_template_counts(tokenizer: HfTokenizer) -> None:
    tokenizer._tokenizer.chat_template = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}"
        "{{ raise_exception('mapping' if a is mapping else 'text') }}"
    )
    with pytest.raises(InvalidArgument, match="refuses the messages: mapping"):
        await render_turns(
            tokenizer,
            chat(called('{"a": 1}')),
            add_generation_prompt=False,
            continue_final_message=False,
            variables={},
        )
