"""The gateway accepts its own answers when client packages send them back with the next message."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.gateway.integration.openai.test_gateway_tools import TEMPLATE, served_prompts
from tests.gateway.serving import Serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer

THOUGHT = "<think>\nhm"
ANSWERS = [
    THOUGHT,
    '<tool_call>{"name": "f", "arguments": {"city": "Ro',
    '<tool_call>{"name": "f", "arguments": {"city": "Rome",}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    '<tool_call>{"name": "f", "arguments": ["one\ntwo"]}</tool_call>',
    f'{THOUGHT}</think>so <tool_call>{{"name": "f", "arguments": {{"city": "one\ntwo\\ud83d"',
]
ASK: list[Any] = [{"role": "user", "content": "hi"}]
MORE: list[Any] = [{"role": "user", "content": "more"}]


Turn = Callable[[Serving, str], Awaitable[None]]
"""Requests an answer, streamed and not streamed, and sends it back with a further message."""


class Weather(BaseModel):
    city: str


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    model = write_tokenizer(tmp_path / "tiny", chat_template=TEMPLATE)
    async with serving_with(model, "hermes", "qwen3") as serving:
        yield serving


async def accepted(served: Serving, path: str, body: dict[str, Any]) -> None:
    response = await served.http.post(path, json={**body, "request_id": "again"})
    assert response.status_code == 200, (body, response.text)
    assert "x-stepwell-ignored-fields" not in response.headers


async def chat_turn(served: Serving, answer: str) -> None:
    served.scheduler.answer = served.tokens(answer)
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": tools, "max_tokens": 120}
    async with served.openai() as client:
        whole = await client.chat.completions.create(**ask)
        async with client.chat.completions.stream(**ask) as stream:
            _ = [event async for event in stream]
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        message = completion.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": None}
            for call in message.tool_calls or ()
        ]
        for dumped in (message.model_dump(), message.model_dump(exclude_none=True)):
            turns = [*ASK, dumped, *results, *MORE]
            await accepted(served, "/v1/chat/completions", {**ask, "messages": turns})


async def test_parsed_chat_completions(served: Serving) -> None:
    served.scheduler.answer = served.tokens('{"city": "Rome"}')
    async with served.openai() as client:
        parsed = await client.chat.completions.parse(
            model="tiny", messages=ASK, response_format=Weather
        )
    message = parsed.choices[0].message
    assert message.parsed == Weather(city="Rome")
    turns = [*ASK, message.model_dump(warnings=False), *MORE]
    await accepted(served, "/v1/chat/completions", {"messages": turns})


async def responses_turn(served: Serving, answer: str) -> None:
    served.scheduler.answer = served.tokens(answer)
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {}, "strict": None}]
    ask: dict[str, Any] = {"model": "tiny", "input": ASK, "tools": tools, "max_output_tokens": 120}
    async with served.openai() as client:
        whole = await client.responses.create(**ask)
        async with client.responses.stream(**ask) as stream:
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": ""}
            for item in response.output
            if item.type == "function_call"
        ]
        items = [item.model_dump() for item in response.output]
        body = {**ask, "input": [*ASK, *items, *results, *MORE]}
        await accepted(served, "/v1/responses", body)


async def messages_turn(served: Serving, answer: str) -> None:
    served.scheduler.answer = served.tokens(answer)
    tools: list[Any] = [{"name": "f", "input_schema": {"type": "object"}}]
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": tools, "max_tokens": 120}
    async with served.anthropic() as client:
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id} for call in calls]
        more = [{"role": "user", "content": results}] if results else []
        said = {"role": "assistant", "content": [part.model_dump() for part in message.content]}
        body = {**ask, "messages": [*ASK, said, *more, *MORE]}
        await accepted(served, "/v1/messages", body)
    inputs = [[b.input for b in m.content if b.type == "tool_use"] for m in (whole, streamed)]
    assert inputs[0] == inputs[1]


@pytest.mark.parametrize("turn", [chat_turn, responses_turn, messages_turn])
async def test_every_answer_is_accepted_back(served: Serving, turn: Turn) -> None:
    for answer in ANSWERS:
        await turn(served, answer)


PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}<assistant>"
)
"""A chat template that reads content as lists of parts, like the template of Llama-Guard-3-1B."""
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_a_template_that_reads_parts_gets_every_text_in_every_api(tmp_path: Path) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "How"}]},
        {"role": "assistant", "content": "so", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How"}]},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seven"},
    ]
    blocks: list[Any] = [
        {"role": "user", "content": "How"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "seven"}],
        },
    ]
    model = write_tokenizer(tmp_path / "tiny", chat_template=PARTS)
    async with serving_with(model, "hermes", "qwen3") as served:
        served.scheduler.answer = served.tokens("yes")
        for path, body in {
            "/v1/chat/completions": {"messages": turns},
            "/v1/responses": {"instructions": "Be short.", "input": items},
            "/v1/messages": {"system": "Be short.", "messages": blocks, "max_tokens": 9},
        }.items():
            await accepted(served, path, body)
        expected = "<system>Be short.<user>How<assistant>so<tool>seven<assistant>"
        assert served_prompts(served) == [expected] * 3
        tokens = await served.http.post("/tokenize", json={"messages": turns})
        assert tokens.json()["tokens"] == served.tokens(expected)
