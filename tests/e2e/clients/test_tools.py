"""Grammars force tool calls, with all services and the clients' own packages."""

import json
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.stack import Stack


class Unit(StrEnum):
    METRIC = "metric"
    IMPERIAL = "imperial"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, Field(max_length=8)]
    days: Annotated[int, Field(ge=1, le=9)]
    unit: Unit


ASK: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
TOOL = openai.pydantic_function_tool(Weather)


@pytest.fixture
async def client(demo_stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{demo_stack.url}/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_the_typed_helpers_of_openai(
    client: openai.AsyncOpenAI, demo_stack: Stack, choice: str
) -> None:
    named = {"type": "function", "function": {"name": "Weather"}}
    ask: dict[str, Any] = {
        "model": demo_stack.model,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": named if choice == "named" else choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 7,
    }
    parsed = await client.chat.completions.parse(**ask)
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert parsed.choices[0].finish_reason == ("stop" if choice == "named" else "tool_calls")
    async with client.chat.completions.stream(**ask) as stream:
        pieces = [e async for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert len(pieces) > 3
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments


async def test_strict_calls_that_the_model_may_make(
    client: openai.AsyncOpenAI, demo_stack: Stack
) -> None:
    answer = await client.chat.completions.create(
        model=demo_stack.model, messages=ASK, tools=[TOOL], max_tokens=60, seed=3
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    for call in message.tool_calls or ():
        assert call.function.name == "Weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
async def test_responses_call_tools_in_turns_of_a_conversation(
    client: openai.AsyncOpenAI, demo_stack: Stack, choice: str | dict[str, Any]
) -> None:
    ask: dict[str, Any] = {
        "model": demo_stack.model,
        "instructions": "Say what the weather is, and nothing besides.",
        "input": ASK,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "extra_body": {"seed": 7},
    }
    parsed = await client.responses.parse(**ask)
    (call,) = parsed.output
    assert isinstance(call.parsed_arguments, Weather)
    async with client.responses.stream(**ask) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    (streamed,) = final.output
    pieces = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3
    assert pieces[-1].snapshot == streamed.arguments == call.arguments
    assert final.usage.input_tokens_details.cached_tokens > 0  # the same prompt was sent before
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    conversation = [*ASK, call, result]
    again = await client.responses.parse(
        **ask | {"input": conversation, "tool_choice": "none", "max_output_tokens": 8}
    )
    assert again.output[0].type == "message"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Weather"}])
async def test_the_client_of_anthropic(demo_stack: Stack, choice: dict[str, Any]) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=demo_stack.url,
        api_key="unused",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        conversation: dict[str, Any] = {
            "model": demo_stack.model,
            "system": "Be brief.",
            "messages": ASK,
            "tools": [{"name": "Weather", "input_schema": Weather.model_json_schema()}],
            "tool_choice": choice | {"disable_parallel_tool_use": True},
        }
        ask: dict[str, Any] = {**conversation, "max_tokens": 200, "extra_body": {"seed": 7}}
        counted = await client.messages.count_tokens(**conversation)
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            pieces = [event async for event in stream if event.type == "input_json"]
            streamed = await stream.get_final_message()
        (call,) = whole.content
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]
        ask["messages"] = [
            *ASK,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": results},
        ]
        again = await client.messages.create(**ask | {"tool_choice": {"type": "none"}})
    assert Weather.model_validate_json(json.dumps(call.input))
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert streamed.content[0].input == call.input
    assert len(pieces) > 3
    usage = streamed.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.cache_read_input_tokens > 0  # the same prompt was sent before
    assert again.content[0].type == "text"


async def test_pydantic_ai_gets_an_object_of_its_output_type(
    client: openai.AsyncOpenAI, demo_stack: Stack
) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(openai_client=client)
    agent = pydantic_ai.Agent(
        models.OpenAIChatModel(demo_stack.model, provider=provider),
        output_type=Weather,
        model_settings={"max_tokens": 200, "parallel_tool_calls": False},
    )
    assert isinstance((await agent.run("The weather in Rome?")).output, Weather)


async def test_langchain_gets_an_object_of_its_schema(demo_stack: Stack) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    with openai.DefaultHttpxClient(verify=False) as plain:
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            model = langchain_openai.ChatOpenAI(
                model=demo_stack.model,
                base_url=f"{demo_stack.url}/v1",
                api_key="none",
                max_tokens=200,
                http_client=plain,
                http_async_client=http,
            )
            bound = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
            said = await bound.ainvoke("The weather in Rome?")
            structured = model.with_structured_output(Weather, method="function_calling")
            got = await structured.ainvoke("The weather in Rome?")
    (call,) = said.tool_calls
    assert Weather.model_validate_json(json.dumps(call["args"]))
    assert isinstance(got, Weather)
