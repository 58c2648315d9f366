"""Anthropic's Messages API with Anthropic's client: texts, tools, thinking, and errors."""

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageCountTokensParams, message_create_params
from pydantic import BaseModel
from stepwell.common.v1 import common_pb2

from services.gateway.adapters.http.anthropic.bodies import CountTokensBody, MessagesBody
from tests.gateway.fake_scheduler import FULL, FakeScheduler
from tests.gateway.integration.openai.test_gateway_tools import (
    REPLAYED,
    STRICT,
    TEMPLATE,
    served_prompts,
    wanted,
)
from tests.gateway.model_outputs import CALLS, SCHEMAS, Recorded
from tests.gateway.serving import Serving, serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer

PATH = "/v1/messages"
ASK: list[Any] = [{"role": "user", "content": "hi"}]
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 1000, "messages": ASK}
TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
THOUGHT = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}",
).replace("{% if reasoning_effort", "{{ '!' if enable_thinking }}{% if reasoning_effort")


def tool(name: str = "get_weather", **others: Any) -> Any:
    return {"name": name, "input_schema": STRICT, **others}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=THOUGHT)


@pytest.fixture
async def client(hermes: Serving) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with hermes.anthropic() as client:
        yield client


@pytest.mark.parametrize("recorded", REPLAYED, ids=lambda one: one.format)
async def test_recorded_answers_whole_and_streamed(calling: Path, recorded: Recorded) -> None:
    async with (
        serving_with(calling, recorded.format, recorded.thinks) as served,
        served.anthropic() as client,
    ):
        served.scheduler.answer = served.tokens(recorded.text)
        whole = await client.messages.create(**BASE, tools=TOOLS)
        async with client.messages.stream(**BASE, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    calls = [(b.name, b.input) for b in whole.content if b.type == "tool_use"]
    assert calls == (CALLS if recorded.calls else [])
    assert "".join(b.text for b in whole.content if b.type == "text") == recorded.content
    thoughts = [b for b in whole.content if b.type == "thinking"]
    assert "".join(b.thinking for b in thoughts) == recorded.reasoning
    assert all(b.signature == sha256(b.thinking.encode()).hexdigest() for b in thoughts)
    assert whole.stop_reason == ("tool_use" if recorded.calls else "end_turn")
    details = whole.usage.output_tokens_details
    assert (details.thinking_tokens > 0) == bool(recorded.reasoning)
    assert _told(whole) == _told(streamed)
    ids = [b.id for b in whole.content if b.type == "tool_use"]
    assert len(set(ids)) == len(ids)


def _told(message: anthropic.types.Message) -> dict[str, Any]:
    """The content of a message. Ids of the message and of its tool calls are left out."""
    told = message.model_dump(exclude={"id", "parsed_output"})
    for block in told["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return told


async def test_events_of_a_stream(hermes: Serving, client: anthropic.AsyncAnthropic) -> None:
    hermes.scheduler.answer = hermes.tokens(f"<think>\nhm\n</think>\n\nso {CALL}")
    hermes.scheduler.num_cached_tokens = 3
    stream = await client.messages.create(**BASE, tools=[tool()], stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [(e.index, e.content_block.type) for e in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    call = starts[2].content_block
    assert (call.name, call.input, call.id[:6]) == ("get_weather", {}, "toolu_")
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == '{"city": "Rome"}'
    usage = events[0].message.usage
    prompt = len(hermes.tokens("[get_weather]user:hi;A:"))
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 3, 3)
    assert events[-2].usage.input_tokens == prompt - 3
    assert events[-2].usage.output_tokens == len(hermes.scheduler.answer) + 1


async def test_the_tool_runner_of_the_client(
    hermes: Serving, client: anthropic.AsyncAnthropic
) -> None:
    calls = []
    hermes.scheduler.answer = hermes.tokens(f"<think>\nhm\n</think>\n\n{CALL}")

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        hermes.scheduler.answer = hermes.tokens("Sunny.")
        return "sunny"

    # The tool runner calls the tool, and sends the conversation again with the tool's result.
    runner = client.beta.messages.tool_runner(**BASE, tools=[get_weather])
    last = await runner.until_done()
    assert ([block.text for block in last.content], last.stop_reason) == (["Sunny."], "end_turn")
    assert calls == ["Rome"]
    first, second = served_prompts(hermes)
    said = "assistant:<hm>(toolu_"
    assert second.startswith(first.removesuffix("A:") + said)
    assert " get_weather city=Rome);tool:sunny#toolu_" in second


async def test_a_conversation_is_rendered_and_counted(
    hermes: Serving, client: anthropic.AsyncAnthropic
) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, "caller": None},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "7", **cached},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", **cached}]
    ask: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [tool()]}
    counted = await client.messages.count_tokens(**ask, system=system)
    answer = await client.messages.create(**ask, system="be\nkind", max_tokens=5)
    text = (
        "[get_weather]system:be\nkind;user:h\ni;assistant:<hm>so(c1 f a=1)(c2 g);tool:7#c1;"
        "tool:x#c2;user:go on;A:"
    )
    assert served_prompts(hermes) == [text]
    assert counted.input_tokens == answer.usage.input_tokens == len(hermes.tokens(text))


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_system_prompt_is_none(
    hermes: Serving, client: anthropic.AsyncAnthropic, system: Any
) -> None:
    for given in ({}, {"system": system}):
        await client.messages.create(**BASE, **given)
    first, second = served_prompts(hermes)
    assert second == first


async def test_claude_codes_billing_block_is_left_out(
    hermes: Serving, client: anthropic.AsyncAnthropic
) -> None:
    for number in range(2):
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        system: list[Any] = [{"type": "text", "text": text} for text in (billing, "be kind")]
        await client.messages.create(**BASE, system=system)
    assert served_prompts(hermes) == ["system:be kind;user:hi;A:"] * 2


async def test_a_last_turn_of_the_assistant_is_continued(
    hermes: Serving, client: anthropic.AsyncAnthropic
) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The well"}]
    await client.messages.create(**BASE | {"messages": begun, "max_tokens": 3})
    assert served_prompts(hermes) == ["user:hi;assistant:The well"]


async def test_how_much_the_model_thinks(hermes: Serving, client: anthropic.AsyncAnthropic) -> None:
    hermes.scheduler.answer = hermes.tokens("<think>\nhm\n</think>\n\nyes")
    for thinking, effort in (
        ({"type": "enabled", "budget_tokens": 2000}, "low"),
        ({"type": "adaptive", "display": "omitted"}, None),
    ):
        config = {} if effort is None else {"output_config": {"effort": effort}}
        whole = await client.messages.create(**BASE, thinking=thinking, **config)
        async with client.messages.stream(**BASE, thinking=thinking, **config) as stream:
            streamed = await stream.get_final_message()
        assert _told(whole) == _told(streamed)
        thought, said = whole.content
        assert thought.thinking == ("" if "display" in thinking else "hm")
        assert (thought.signature, said.text) == (sha256(b"hm").hexdigest(), "yes")
    assert served_prompts(hermes)[::2] == ["user:hi;!~lowA:", "user:hi;A:"]


async def test_forced_calls_and_forms_without_flags(calling: Path) -> None:
    async with serving(calling, FakeScheduler()) as served, served.anthropic() as client:
        ask: dict[str, Any] = {**BASE, "max_tokens": 90, "tools": [tool(), tool("other")]}
        served.scheduler.answer = served.tokens('[{"name": "other", "parameters": {"city": "R"}}]')
        only = {"disable_parallel_tool_use": True}
        answer = await client.messages.create(**ask, tool_choice={"type": "any", **only})
        (call,) = answer.content
        assert (call.name, call.input, answer.stop_reason) == ("other", {"city": "R"}, "tool_use")
        assert wanted(served).kind == common_pb2.STRUCTURED_OUTPUTS_KIND_GRAMMAR
        served.scheduler.answer = served.tokens('{"city": "R"}')
        answer = await client.messages.create(**ask, tool_choice={"type": "tool", "name": "other"})
        (call,) = answer.content
        assert (call.name, call.input, answer.stop_reason) == ("other", {"city": "R"}, "tool_use")
        assert json.loads(wanted(served).text) == STRICT
        answer = await client.messages.create(**ask, tool_choice={"type": "none"})
        assert answer.content[0].text == '{"city": "R"}'
        with pytest.raises(anthropic.BadRequestError, match="--enable-auto-tool-choice"):
            await client.messages.create(**ask)

        class City(BaseModel):
            city: str

        parsed = await client.messages.parse(**BASE | {"max_tokens": 90}, output_format=City)
        assert parsed.parsed_output == City(city="R")
        assert json.loads(wanted(served).text)["required"] == ["city"]


async def test_the_stop_reason_says_why_an_answer_ended(
    hermes: Serving, client: anthropic.AsyncAnthropic
) -> None:
    hermes.scheduler.answer = hermes.tokens("one two three")

    async def ends(**fields: Any) -> tuple[str | None, str | None]:
        whole = await client.messages.create(**BASE | fields)
        async with client.messages.stream(**BASE | fields) as stream:
            streamed = await stream.get_final_message()
        assert _told(whole) == _told(streamed)
        return whole.stop_reason, whole.stop_sequence

    assert await ends() == ("end_turn", None)
    assert await ends(stop_sequences=["x", "three"]) == ("stop_sequence", "three")
    assert await ends(max_tokens=2) == ("max_tokens", None)
    hermes.scheduler.answer = hermes.tokens(CALL)[:-20]
    assert await ends(max_tokens=25, tools=[tool()]) == ("max_tokens", None)
    hermes.scheduler.answer = hermes.tokens("word " * 50)
    long = [{"role": "user", "content": "x" * 3980}]
    assert await ends(messages=long) == ("model_context_window_exceeded", None)
    room = 4000 - len(hermes.tokens(f"user:{'x' * 3980};A:"))
    assert hermes.scheduler.adds[-1].sampling.max_tokens == room < 20


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": [2, 3, "ab',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": [2, 3,],}}',
    ],
)
async def test_a_call_with_a_mistake_has_the_input_that_was_written(
    hermes: Serving, client: anthropic.AsyncAnthropic, call: str
) -> None:
    hermes.scheduler.answer = hermes.tokens(call)
    ask: dict[str, Any] = {**BASE, "tools": [tool()]}
    whole = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        streamed = await stream.get_final_message()
    assert whole.content[0].input == streamed.content[0].input == {"city": "Rome", "days": [2, 3]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].image ",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].document ",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages[0].content[0]",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    (
        {
            "messages": [
                *ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
            ]
        },
        "messages",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [tool()] * 2}, "tools[1].name"),
    ({"tools": [tool("no spaces")]}, "tools[0].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [tool(input_schema={"anyOf": 1})], "tool_choice": {"type": "any"}}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "format"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"container": "c"}, "container"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
]


async def test_what_is_wrong_is_named(hermes: Serving) -> None:
    base = BASE | {"max_tokens": 4}
    for number, (body, field) in enumerate(WRONG):
        asked = {**base, "stream": number % 2 == 0, **body}
        response = await hermes.http.post(PATH, json=asked)
        assert response.status_code == 400, (body, response.text)
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert field in answer["error"]["message"], body
    assert hermes.scheduler.adds == []


async def test_templates_read_how_much_to_think_without_a_reasoning_parser(calling: Path) -> None:
    async with serving(calling, FakeScheduler()) as served, served.anthropic() as client:
        on, low = {"type": "enabled", "budget_tokens": 2000}, {"effort": "low"}
        ask = BASE | {"max_tokens": 5}
        await client.messages.create(**ask, thinking=on, output_config=low)
        await client.messages.count_tokens(
            model=ask["model"], messages=ask["messages"], thinking=on, output_config=low
        )
        assert served_prompts(served) == ["user:hi;!~lowA:"]


async def test_errors_are_those_that_the_client_knows(model: Path) -> None:
    fake = FakeScheduler()
    async with serving(model, fake) as served, served.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError, match="another"):
            await client.messages.create(**BASE | {"model": "another"})
        fake.rejection = FULL
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**BASE, stream=True)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        assert caught.value.response.headers["retry-after"] == "2"


async def test_requests_of_an_agents_session_stay_at_one_replica(model: Path) -> None:
    one, other = FakeScheduler(), FakeScheduler()
    async with serving(model, one, other, routing_policy="consistent-hash") as served:
        for header, num_used in ({}, 2), ({"X-Claude-Code-Session-Id": "s1"}, 1):
            one.adds.clear()
            other.adds.clear()
            for number in range(12):
                messages = [{"role": "user", "content": f"{number} " * 40}]
                body = BASE | {"max_tokens": 1, "messages": messages}
                assert (await served.http.post(PATH, json=body, headers=header)).is_success
            assert bool(one.adds) + bool(other.adds) == num_used
        long = {"X-Claude-Code-Session-Id": "s" * 257}
        response = await served.http.post(PATH, json=BASE | {"max_tokens": 1}, headers=long)
        assert (
            "X-Claude-Code-Session-Id may have at most 256 bytes"
            in response.json()["error"]["message"]
        )
        body = {"model": "tiny", "input": "hi", "prompt_cache_key": "s" * 257}
        response = await served.http.post("/v1/responses", json=body)
        assert response.json()["error"]["param"] == "prompt_cache_key"


async def test_an_error_within_a_stream(model: Path) -> None:
    fake = FakeScheduler(permits=2)
    async with serving(model, fake) as served, served.anthropic() as client:
        stream = await client.messages.create(**BASE | {"max_tokens": 50}, stream=True)
        assert (await anext(stream)).type == "message_start"
        fake.engine_error = "broken"
        fake.run_freely()
        with pytest.raises(anthropic.APIStatusError) as caught:
            _ = [event async for event in stream]
        assert caught.value.body["error"]["type"] == "api_error"


def test_every_field_of_the_client_is_known() -> None:
    """Fails if a new version of the client's package adds a field."""
    for params, body in (
        (message_create_params.MessageCreateParamsBase, MessagesBody),
        (MessageCountTokensParams, CountTokensBody),
    ):
        assert params.__annotations__.keys() <= body.model_fields.keys(), params
