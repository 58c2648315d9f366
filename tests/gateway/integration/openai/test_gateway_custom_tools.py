"""Custom tools of the responses API, whose input is a text, such as Codex's apply_patch."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import CustomToolParam

from services.gateway.adapters.http.openai.responses.tools import CustomTool
from tests.gateway.integration.openai.test_gateway_tools import TEMPLATE, served_prompts, wanted
from tests.gateway.serving import Serving
from tests.gateway.tiny_tokenizer import write_tokenizer

PATCH = '*** Begin Patch\n+re.match("\\d\\\\n", "é😀\t")\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
TOOL: Any = {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR}
ASK: dict[str, Any] = {"model": "tiny", "tools": [TOOL, {"type": "tool_search"}]}
DESCRIBED = TEMPLATE.replace(
    "[{{ t.function.name }}]", "[{{ t.function.name }}|{{ t.function.description }}]"
)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=DESCRIBED)


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        (r'{"input": "\d and \\d"}', r"\d and \d"),
        ('{"why": "to", "input": "mend"}', "mend"),
        ('{"patch": "x"}', '{"patch": "x"}'),
    ],
    ids=["escaped", "unescaped", "invalid escape", "second argument", "another argument"],
)
async def test_a_custom_tool_is_called_with_a_text(
    hermes: Serving, arguments: str, expected: str
) -> None:
    hermes.scheduler.answer = hermes.tokens(f"so {call(arguments)}")
    async with hermes.openai() as client:
        whole = await client.responses.create(**ASK, input="hi")
        stream = await client.responses.create(**ASK, input="hi", stream=True)
        events = [event async for event in stream]
    streamed = events[-1].response
    for response in (whole, streamed):
        said, called = response.output
        assert (said.type, called.type) == ("message", "custom_tool_call")
        assert (called.name, called.input) == ("patch", expected)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == expected
    assert len(deltas) > 3 or not arguments.startswith('{"input"')
    (done,) = (e for e in events if e.type == "response.custom_tool_call_input.done")
    assert (done.input, done.item_id) == (expected, called.id)
    kinds = [event.type for event in events]
    assert kinds.index(done.type) < kinds.index("response.output_item.done", kinds.index(done.type))
    result = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "done"}
    async with hermes.openai() as client:
        items: list[Any] = [{"role": "user", "content": "hi"}, *streamed.output, result]
        await client.responses.create(**ASK, input=items)
    begin, _, prompt = served_prompts(hermes)
    described = 'Edits.\n\nThe text must conform to this grammar:\nstart: "x"'
    assert begin == f"[patch|{described}]user:hi;A:"
    sent = f"assistant:so({called.call_id} patch input={expected});tool:done#{called.call_id};A:"
    assert prompt == begin.removesuffix("A:") + sent


async def test_a_custom_tool_may_be_forced(hermes: Serving) -> None:
    hermes.scheduler.answer = hermes.tokens('{"input": "a\\nb"}')
    body = {**ASK, "input": "hi", "tool_choice": {"type": "custom", "name": "patch"}}
    answer = await hermes.http.post("/v1/responses", json=body)
    (called,) = answer.json()["output"]
    assert (called["type"], called["input"]) == ("custom_tool_call", "a\nb")
    assert '"required": ["input"]' in wanted(hermes).text
    ignored = answer.headers["x-stepwell-ignored-fields"]
    assert ignored == "tools.format, tools.tool_search"


async def test_the_text_of_a_call_that_is_cut_is_what_was_written(hermes: Serving) -> None:
    text = call(r'{"input": "a\\\u00e9b\u00"}')
    hermes.scheduler.answer = hermes.tokens(text[: text.index('"}')])
    most = len(hermes.scheduler.answer)
    body = {**ASK, "input": "hi", "max_output_tokens": most}
    answer = (await hermes.http.post("/v1/responses", json=body)).json()
    (called,) = answer["output"]
    assert (answer["status"], called["status"], called["input"]) == (
        "incomplete",
        "incomplete",
        "a\\éb",
    )


def test_every_field_of_the_clients_tool_is_known() -> None:
    known = {field.alias or name for name, field in CustomTool.model_fields.items()}
    assert CustomToolParam.__annotations__.keys() <= known
