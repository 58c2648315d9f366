"""OpenAI's Responses API, tested with OpenAI's client: texts, tools and reasoning."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, response_create_params
from pydantic import BaseModel
from stepwell.common.v1 import common_pb2

from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.responses.tools import ResponsesTool
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.integration.openai.test_gateway_messages import CALL, THOUGHT
from tests.gateway.integration.openai.test_gateway_tools import (
    REPLAYED,
    STRICT,
    served_prompts,
    wanted,
)
from tests.gateway.model_outputs import CALLS, SCHEMAS, Recorded
from tests.gateway.serving import Serving, serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer

PATH = "/v1/responses"
BASE: dict[str, Any] = {"model": "tiny", "input": "hi"}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
]


def tool(name: str = "get_weather", **others: Any) -> Any:
    return {"type": "function", "name": name, "parameters": STRICT, **others}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=THOUGHT)


@pytest.fixture
async def client(hermes: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    async with hermes.openai() as client:
        yield client


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """Streams a response. Returns the response in the last event, and all events."""
    stream = await client.responses.create(**BASE | fields, stream=True)
    events = [event async for event in stream]
    return events[-1].response, events


def told(response: Any) -> dict[str, Any]:
    """The content of a response, without the ids of the response and of its items."""
    body: dict[str, Any] = response.model_dump(exclude={"id", "created_at"})
    for item in body["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return body


@pytest.mark.parametrize("recorded", REPLAYED, ids=lambda one: one.format)
async def test_recorded_answers_whole_and_streamed(calling: Path, recorded: Recorded) -> None:
    async with (
        serving_with(calling, recorded.format, recorded.thinks) as served,
        served.openai() as client,
    ):
        served.scheduler.answer = served.tokens(recorded.text)
        whole = await client.responses.create(**BASE, tools=TOOLS)
        last, _ = await streamed(client, tools=TOOLS)
    calls = [item for item in whole.output if item.type == "function_call"]
    made = [(call.name, json.loads(call.arguments)) for call in calls]
    assert made == (CALLS if recorded.calls else [])
    assert whole.output_text == recorded.content
    thoughts = [item.content[0].text for item in whole.output if item.type == "reasoning"]
    assert "".join(thoughts) == recorded.reasoning
    details = whole.usage.output_tokens_details
    assert (details.reasoning_tokens > 0) == bool(recorded.reasoning)
    assert (whole.status, told(last)) == ("completed", told(whole))
    ids = [item.id for item in whole.output] + [call.call_id for call in calls]
    assert len(set(ids)) == len(ids)


async def test_events_of_a_stream(hermes: Serving, client: openai.AsyncOpenAI) -> None:
    hermes.scheduler.answer = hermes.tokens(f"<think>\nhm\n</think>\n\nso {CALL}")
    hermes.scheduler.num_cached_tokens = 3
    last, events = await streamed(client, tools=[tool()])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ("output_item.added", "content_part.added", "{0}.delta", "{0}.done")
    text = (*text, "content_part.done", "output_item.done")
    call = ("output_item.added", "{0}.delta", "{0}.done", "output_item.done")
    expected = [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        *(kind.format("function_call_arguments") for kind in call),
        "completed",
    ]
    assert [k for n, k in enumerate(kinds) if n == 0 or k != kinds[n - 1]] == expected
    places = [(event.output_index, event.item_id) for event in events if hasattr(event, "item_id")]
    ids = [item.id for item in last.output]
    assert all(ids[index] == item_id for index, item_id in places)
    by_kind = {event.type.removeprefix("response."): event for event in events}
    assert by_kind["output_text.done"].text == last.output_text == "so"
    assert by_kind["reasoning_text.done"].text == "hm"
    assert by_kind["function_call_arguments.done"].arguments == '{"city": "Rome"}'
    assert kinds.count("function_call_arguments.delta") > 3
    usage = last.usage
    prompt = len(hermes.tokens("[get_weather]user:hi;A:"))
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (prompt, 3)
    assert usage.total_tokens == prompt + len(hermes.scheduler.answer) + 1


async def test_calls_and_their_results_go_back(hermes: Serving, client: openai.AsyncOpenAI) -> None:
    """The second request contains the items of the first response, unchanged."""
    hermes.scheduler.answer = hermes.tokens(f"<think>\nhm\n</think>\n\nso {CALL}")
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    ask: dict[str, Any] = {"model": "tiny", "instructions": "be kind", "tools": [tool()]}
    first = await client.responses.create(**ask, input=asked)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    hermes.scheduler.answer = hermes.tokens("Sunny.")
    async with client.responses.stream(**ask, input=[*asked, *first.output, result]) as stream:
        events = [event async for event in stream]
        second = await stream.get_final_response()
    assert second.output_text == "Sunny."
    assert [e.snapshot for e in events if e.type == "response.output_text.delta"][-1] == "Sunny."
    begin, again = served_prompts(hermes)
    assert begin == "[get_weather]system:be kind;user:hi;A:"
    said = f"assistant:<hm>so({call.call_id} get_weather city=Rome);tool:sunny#{call.call_id};A:"
    assert again == begin.removesuffix("A:") + said


async def test_a_function_of_a_namespace_is_called_and_sent_back(
    hermes: Serving, client: openai.AsyncOpenAI
) -> None:
    """Codex sends some tools in namespaces. It also sends web searches, which are ignored."""
    space: Any = {"type": "namespace", "name": "world", "tools": [tool()]}
    ask: dict[str, Any] = {"model": "tiny", "tools": [{"type": "web_search"}, space]}
    whole = CALL.replace("get_weather", "world__get_weather")
    hermes.scheduler.answer = hermes.tokens(whole)
    first = await client.responses.create(**ask, input="hi")
    async with client.responses.stream(**ask, input="hi") as stream:
        streamed = await stream.get_final_response()
    for response in (first, streamed):
        (call,) = response.output
        assert (call.name, call.namespace) == ("get_weather", "world")
        assert call.arguments == '{"city": "Rome"}'
        assert [one.type for one in response.tools] == ["namespace"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: list[Any] = [{"role": "user", "content": "hi"}, *streamed.output, result]
    hermes.scheduler.answer = hermes.tokens('{"city": "Rome"}')
    named: Any = {"type": "function", "name": "get_weather"}
    again = await client.responses.create(**ask, input=items, tool_choice=named)
    assert (again.output[0].name, again.output[0].namespace) == ("get_weather", "world")
    begin, _, prompt = served_prompts(hermes)
    assert begin == "[world__get_weather]user:hi;A:"
    called = f"({call.call_id} world__get_weather city=Rome)"
    assert prompt == f"[world__get_weather]user:hi;assistant:{called};tool:sunny#{call.call_id};A:"


async def test_what_the_assistant_said_in_several_turns_stays_apart(
    hermes: Serving, client: openai.AsyncOpenAI
) -> None:
    def said(text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        return {"type": "message", "id": "m", "role": "assistant", "content": [part]}

    def called(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    thought = {"type": "reasoning", "id": "r", "summary": []}
    thought |= {"content": [{"type": "reasoning_text", "text": "hm"}]}
    items: list[Any] = [said("a"), said("b"), called("f"), called("g"), thought, called("h")]
    await client.responses.create(model="tiny", input=items, max_output_tokens=2)
    text = "assistant:a;assistant:b(f f)(g g);assistant:<hm>(h h);A:"
    assert served_prompts(hermes) == [text]


async def test_forced_calls_and_forms_without_flags(calling: Path) -> None:
    async with serving(calling, FakeScheduler()) as served, served.openai() as client:
        ask: dict[str, Any] = {**BASE, "max_output_tokens": 90}
        tools = [tool(), tool("other")]
        served.scheduler.answer = served.tokens('[{"name": "other", "parameters": {"city": "R"}}]')
        answer = await client.responses.create(
            **ask, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = answer.output
        assert (call.name, call.arguments) == ("other", '{"city": "R"}')
        assert wanted(served).kind == common_pb2.STRUCTURED_OUTPUTS_KIND_GRAMMAR
        served.scheduler.answer = served.tokens('{"city": "R"}')
        named: Any = {"type": "function", "name": "other"}
        answer = await client.responses.create(**ask, tools=tools, tool_choice=named)
        (call,) = answer.output
        assert (call.name, call.arguments) == ("other", '{"city": "R"}')
        assert answer.tool_choice.name == "other"
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
            await client.responses.create(**ask, tools=tools)

        class City(BaseModel):
            city: str

        parsed = await client.responses.parse(**ask, text_format=City)
        assert parsed.output_parsed == City(city="R")
        assert json.loads(wanted(served).text)["required"] == ["city"]
        await client.responses.create(**ask, text={"format": {"type": "json_object"}})
        assert json.loads(wanted(served).text) == {"type": "object"}


async def test_what_is_asked_reaches_the_model_and_is_told(
    hermes: Serving, client: openai.AsyncOpenAI
) -> None:
    hermes.scheduler.answer = hermes.tokens("one two three four")
    fields: dict[str, Any] = {
        "max_output_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    whole = await client.responses.create(**BASE, **fields)
    last, events = await streamed(client, **fields)
    assert (events[-1].type, told(last)) == ("response.incomplete", told(whole))
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.output[0].status, whole.store) == ("incomplete", False)
    assert (whole.temperature, whole.top_p, whole.metadata) == (0.5, 0.25, {"a": "b"})
    assert served_prompts(hermes)[0] == "user:hi;!~lowA:"
    sampling = hermes.scheduler.adds[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.25)


async def test_an_error_within_a_stream(model: Path) -> None:
    fake = FakeScheduler(permits=2)
    async with serving(model, fake) as served, served.openai() as client:
        stream = await client.responses.create(**BASE, max_output_tokens=50, stream=True)
        assert (await anext(stream)).type == "response.created"
        fake.engine_error = "broken"
        fake.run_freely()
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.code == "server_error"
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(**BASE, max_output_tokens=50)


async def test_a_schema_that_becomes_too_complex_is_the_clients_error(model: Path) -> None:
    fake = FakeScheduler(permits=2)
    fake.engine_reason = common_pb2.FINISH_REASON_GRAMMAR_ERROR
    text: Any = {"format": {"type": "json_object"}}
    async with serving(model, fake) as served, served.openai() as client:
        stream = await client.responses.create(**BASE, text=text, stream=True)
        assert (await anext(stream)).type == "response.created"
        fake.engine_error = "structured_outputs: too many states"
        fake.run_freely()
        last = [event async for event in stream][-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.code == "invalid_prompt"
        assert last.response.error.message == "text.format: too many states"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**BASE, text=text)
        assert (refused.value.code, refused.value.param) == ("grammar_error", "text.format")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": "x " * 5000}, "input"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [tool()] * 2}, "tools[1].name"),
    ({"tools": [{"type": "web_search"}, {"type": "image_generation"}]}, "tools[1].type"),
    ({"tools": [tool(parameters={"anyOf": 1})], "tool_choice": "required"}, "tools[0].parameters"),
    (
        {
            "tools": [
                {"type": "web_search"},
                {"type": "namespace", "name": "n", "tools": [tool()] * 2},
            ]
        },
        "tools[1].tools[1].name",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [tool() | {"type": "custom"}]}]},
        "tools[0].tools[0].type",
    ),
    (
        {"tools": [{"type": "namespace", "name": f"n{n}", "tools": [tool()] * 300} for n in "ab"]},
        "tools",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}},
        "text.format",
    ),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
]


async def test_what_is_wrong_is_named(hermes: Serving) -> None:
    for number, (body, field) in enumerate(WRONG):
        asked = {**BASE, "max_output_tokens": 4, "stream": number % 2 == 0, **body}
        response = await hermes.http.post(PATH, json=asked)
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["param"] == field, (body, response.text)
    assert hermes.scheduler.adds == []


async def test_a_reference_to_an_item_is_refused_with_the_remedy(hermes: Serving) -> None:
    """The AI SDK of Vercel sends references, unless its option `store` is false."""
    items = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "rs_1"}]
    refused = await hermes.http.post(PATH, json=BASE | {"input": items})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "input[1]")
    assert "send the items, as clients do if store is false" in error["message"]


async def test_effort_and_what_is_stored_are_served_without_a_parser(served: Serving) -> None:
    body = BASE | {"reasoning": {"effort": "low"}, "store": True, "max_output_tokens": 2}
    response = await served.http.post(PATH, json=body)
    assert response.headers["x-stepwell-ignored-fields"] == "store"
    assert response.json()["reasoning"]["effort"] == "low"
    assert response.json()["store"] is False


def test_every_field_of_the_client_is_known() -> None:
    """Fails if a new version of the client's package adds a field."""
    params = response_create_params.ResponseCreateParamsBase
    assert params.__annotations__.keys() <= ResponsesBody.model_fields.keys()
    known = {field.alias or name for name, field in ResponsesTool.model_fields.items()}
    assert FunctionToolParam.__annotations__.keys() <= known
