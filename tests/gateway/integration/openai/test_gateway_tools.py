"""Tools and reasoning in chat completions, tested with OpenAI's client: answers in the formats of
several models, and grammars that force tool calls.
"""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from stepwell.common.v1 import common_pb2

from services.common.pool.block_hash import unpack_token_ids
from services.gateway.core.text.parsing.catalog import TOOL_FORMATS
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.model_outputs import CALLS, RECORDED, SCHEMAS, Recorded
from tests.gateway.serving import Serving, serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if reasoning_effort %}~{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}A:{% if thinks %}<think>\n{% endif %}{% endif %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK: list[Any] = [{"role": "user", "content": "hi"}]
STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "get_weather", **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": STRICT, **others}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=TEMPLATE)


# Without answers in harmony's format, whose <|end|> is this tokenizer's end of sequence.
REPLAYED = [one for one in RECORDED if "<|end|>" not in one.text]


@pytest.mark.parametrize("recorded", REPLAYED, ids=lambda one: one.format)
async def test_recorded_answers_whole_and_streamed(calling: Path, recorded: Recorded) -> None:
    async with serving_with(calling, recorded.format, recorded.thinks) as served:
        served.scheduler.answer = served.tokens(recorded.text)
        ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS}
        async with served.openai() as client:
            whole = await client.chat.completions.create(**ask)
            async with client.chat.completions.stream(
                **ask, stream_options={"include_usage": True}
            ) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_completion()
    for completion in (whole, final):
        (choice,) = completion.choices
        message = choice.message
        assert (message.content or "") == recorded.content
        assert (message.model_extra or {}).get("reasoning", "") == recorded.reasoning
        calls = [
            (c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()
        ]
        assert calls == (CALLS if recorded.calls else [])
        assert choice.finish_reason == ("tool_calls" if recorded.calls else "stop")
        details = completion.usage.completion_tokens_details
        assert (details.reasoning_tokens > 0) == bool(recorded.reasoning)
    ids = [call.id for call in whole.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert [(e.name, json.loads(e.arguments)) for e in done] == (CALLS if recorded.calls else [])


async def test_text_after_a_call_is_a_line_of_its_own(hermes: Serving) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    hermes.scheduler.answer = hermes.tokens(f"First.\n{call}\n{call}\nThen more.")
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [tool()]}
    async with hermes.openai() as client:
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert whole.choices[0].message.content == "First.\nThen more."
    assert "".join(piece or "" for piece in pieces) == "First.\nThen more."


async def test_deltas_of_a_call(hermes: Serving) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    hermes.scheduler.answer = hermes.tokens(text)
    async with hermes.openai() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    calls = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    first, *rest = calls
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id.startswith("chatcmpl-tool-")
    assert all(c.id is None and c.function.name is None and c.index == 0 for c in rest)
    assert len(rest) > 3
    assert "".join(c.function.arguments for c in rest) == '{"city": "Rome"}'
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_calls_of_requests_with_the_same_id_have_their_own_ids(
    hermes: Serving, path: str
) -> None:
    """Services often forward the request id of their own client with all requests of an agent."""
    text = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    hermes.scheduler.answer = hermes.tokens(text)
    schema = {"type": "object"}
    kinds = {
        "chat/completions": {"type": "function", "function": {"name": "get_weather"}},
        "responses": {"type": "function", "name": "get_weather"},
        "messages": {"name": "get_weather", "input_schema": schema},
    }
    asked = {"input": "hi"} if path == "responses" else {"messages": ASK, "max_tokens": 99}
    ids = [
        re.findall(
            r'"(?:id|call_id)":"((?:chatcmpl-tool-|call_|fc_|toolu_)\w+)"',
            (
                await hermes.http.post(
                    f"/v1/{path}",
                    json=asked | {"tools": [kinds[path]]},
                    headers={"X-Request-Id": "run"},
                )
            ).text,
        )
        for _ in range(3)
    ]
    assert all(ids)
    assert len({name for some in ids for name in some}) == sum(map(len, ids))


async def test_reasoning_that_the_prompt_began_is_apart_and_counted(hermes: Serving) -> None:
    hermes.scheduler.answer = hermes.tokens("hm\n</think>\n\nyes")
    body = {"messages": ASK, "chat_template_kwargs": {"thinks": True}}
    answer = (await hermes.http.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")
    # All tokens up to the last token of the end marker count as reasoning tokens.
    counted = len(hermes.tokens("hm\n</think>")) - 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    body |= {"include_reasoning": False, "reasoning_effort": "low"}
    answer = (await hermes.http.post("/v1/chat/completions", json=body)).json()
    assert "reasoning" not in answer["choices"][0]["message"]
    plain, low = served_prompts(hermes)
    assert low == plain.replace("A:", "~lowA:")


async def test_a_conversation_with_calls_is_rendered(hermes: Serving) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    response = await hermes.http.post(
        "/tokenize", json={"messages": messages, "tools": [tool()], "return_token_strs": False}
    )
    text = "[get_weather]user:hi;assistant:(c1 f a=1);tool:7#c1;A:"
    assert response.json()["tokens"] == hermes.tokens(text)


def served_prompts(served: Serving) -> list[str]:
    prompts = [unpack_token_ids(add.prompt_token_ids) for add in served.scheduler.adds]
    return [served.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]


def wanted(served: Serving) -> Any:
    return served.scheduler.adds[-1].sampling.structured_outputs


async def test_forced_calls_are_read_from_the_text_that_their_grammar_makes(calling: Path) -> None:
    async with serving(calling, FakeScheduler()) as served, served.openai() as client:
        ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [tool(), tool("other")]}
        served.scheduler.answer = served.tokens('[{"name": "other", "parameters": {"city": "R"}}]')
        required = await client.chat.completions.create(**ask, tool_choice="required")
        (call,) = required.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("other", '{"city": "R"}')
        assert required.choices[0].finish_reason == "tool_calls"
        assert wanted(served).kind == common_pb2.STRUCTURED_OUTPUTS_KIND_GRAMMAR
        served.scheduler.answer = served.tokens('{"city": "R"}')
        choice = {"type": "function", "function": {"name": "other"}}
        named = await client.chat.completions.create(**ask, tool_choice=choice)
        (call,) = named.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("other", '{"city": "R"}')
        assert named.choices[0].finish_reason == "stop"
        assert json.loads(wanted(served).text) == STRICT
        none = await client.chat.completions.create(**ask, tool_choice="none")
        assert none.choices[0].message.content == '{"city": "R"}'
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
            await client.chat.completions.create(**ask)


async def test_strict_tools_hold_free_calls_and_one_call_is_all_that_is_wanted(
    hermes: Serving,
) -> None:
    body = {"messages": ASK, "tools": [tool(strict=True)], "parallel_tool_calls": False}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "R"}}\n</tool_call>'
    hermes.scheduler.answer = hermes.tokens(call + call)
    answer = (await hermes.http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert '"additionalProperties": false' in wanted(hermes).text
    body["tools"] = [tool()]
    await hermes.http.post("/v1/chat/completions", json=body)
    assert not hermes.scheduler.adds[-1].sampling.HasField("structured_outputs")
    body["response_format"] = {"type": "json_object"}
    answer = (await hermes.http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert wanted(hermes).kind == common_pb2.STRUCTURED_OUTPUTS_KIND_GRAMMAR


@pytest.mark.parametrize("format_", [*dict.fromkeys(one.format for one in RECORDED)])
async def test_strict_tools_are_held_or_served_without_the_guarantee(
    calling: Path, format_: str
) -> None:
    is_held = TOOL_FORMATS[format_].envelope is not None
    asked: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            {"messages": ASK, "tools": [tool(), tool("g", strict=True)]},
            "tools.function.strict",
        ),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "function", **tool(strict=True)["function"]}]},
            "tools.strict",
        ),
        (
            "/v1/messages",
            {
                "messages": ASK,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": STRICT, "strict": True}],
            },
            "tools.strict",
        ),
    ]
    settings = {"tool_call_parser": format_, "enable_auto_tool_choice": True}
    async with serving(calling, FakeScheduler(), **settings) as served:
        served.scheduler.answer = served.tokens("yes")
        for number, (path, body, name) in enumerate(asked):
            response = await served.http.post(path, json={**body, "stream": number % 2 == 1})
            assert response.status_code == 200, response.text
            ignored = response.headers.get("x-stepwell-ignored-fields")
            assert ignored == (None if is_held else name)
            sampling = served.scheduler.adds[-1].sampling
            assert sampling.HasField("structured_outputs") == is_held


REFERRED = ("Resp[int]", "Map<string,int>", "My Type", "名前", "a%b", "A|B")
"""Names of definitions that a URI cannot contain unescaped."""


async def test_a_reference_may_have_any_name_in_every_api(hermes: Serving) -> None:
    for name in REFERRED:
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/{name}"}},
            "required": ["a"],
            "$defs": {name: {"type": "integer"}},
        }
        for path, body in bodies_with(schema).items():
            response = await hermes.http.post(path, json=body)
            assert response.status_code == 200, response.text
            assert wanted(hermes).text
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": ASK, "response_format": form, "max_tokens": 3}
        response = await hermes.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert wanted(hermes).text


def bodies_with(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each API, a request with a tool that has this schema and must be called."""
    choice = {"type": "function", "name": "g"}
    return {
        "/v1/chat/completions": {
            "messages": ASK,
            "max_tokens": 3,
            "tools": [tool("f"), tool("g", parameters=schema)],
            "tool_choice": "required",
        },
        "/v1/responses": {
            "input": "hi",
            "max_output_tokens": 3,
            "tools": [
                {"type": "function", "name": "f"},
                {"type": "function", "name": "g", "parameters": schema},
            ],
            "tool_choice": choice,
        },
        "/v1/messages": {
            "messages": ASK,
            "max_tokens": 3,
            "tools": [
                {"name": "f", "input_schema": {"type": "object"}},
                {"name": "g", "input_schema": schema},
            ],
            "tool_choice": {"type": "any"},
        },
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "not": {}},
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/No[x]"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    ],
    ids=json.dumps,
)
async def test_a_tool_whose_schema_is_refused_is_named_in_every_api(
    hermes: Serving, schema: dict[str, Any]
) -> None:
    named = {
        "/v1/chat/completions": "tools[1].function.parameters",
        "/v1/responses": "tools[1].parameters",
        "/v1/messages": "tools[1].input_schema",
    }
    for path, body in bodies_with(schema).items():
        response = await hermes.http.post(path, json=body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(f"{named[path]} of the tool 'g': ")


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 90_000}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()] * 2, "tool_choice": "required"}, "tools[1].function.name"),
    ({"tools": [tool(f"f{n}") for n in range(600)]}, "tools"),
    ({"tools": [tool(parameters=_deep(70))]}, "tools[0].function.parameters"),
    ({"tools": [tool("no spaces")]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    (
        {
            "tools": [tool("f"), tool(parameters={"type": "object", "not": {}})],
            "tool_choice": "required",
        },
        "tools[1].function.parameters",
    ),
    (
        {
            "tools": [tool(parameters={"type": "object", "minProperties": 2})],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        },
        "tools[0].function.parameters",
    ),
    (
        {"tools": [tool("f"), tool(parameters={"$ref": "#/$defs/No[x]"}, strict=True)]},
        "tools[1].function.parameters",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}},
            }
        },
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "minProperties": 2}},
            },
            "tools": [tool()],
        },
        "response_format",
    ),
    (
        {"messages": [{"role": "user", "content": "", "tool_calls": [_CALL]}]},
        "messages[0].tool_calls",
    ),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {"format": _deep(40)}}}, "structured_outputs"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {
            "structured_outputs": {
                "structural_tag": '{"format": ' + '{"json_schema":' * 900 + "1" + "}" * 901
            }
        },
        "structured_outputs",
    ),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("body", "field"), WRONG)
async def test_what_is_wrong_is_named(hermes: Serving, body: dict[str, Any], field: str) -> None:
    response = await hermes.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert not any(part in error["message"] for part in ("start:", "%json", "x-guidance", "| r0"))
    assert hermes.scheduler.adds == []
