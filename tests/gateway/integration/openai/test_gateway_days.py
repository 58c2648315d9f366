"""Runs thirty turns of an agent through each common client package, unchanged.

The model's answers are scripted: tool calls, plain texts, refusals, reasoning without an answer,
and calls that are broken or cut off. The gateway must accept every history that a package builds
from these answers, and lose none of its texts.
"""

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from stepwell.scheduler.v1 import scheduler_pb2

from tests.gateway.fake_scheduler import FakeScheduler, Sequence
from tests.gateway.integration.openai.test_gateway_tools import TEMPLATE, served_prompts
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

NUM_TURNS = 30
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>\nI need it.\n</think>\n\n"
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro\nme",}}\n</tool_call>'
ANSWERS = (
    f"{THOUGHT}{CALL}",
    f"{THOUGHT}Sunny in Rome.",
    f"{THOUGHT}I cannot help with that.",
    "<think>\nI only wonder.",
    f"{THOUGHT}Let me look. {CALL}",
    f"{THOUGHT}{BROKEN}",
    f"{THOUGHT}{CALL[:60]}",
)
BROKEN_ANSWERS = (5, 6)
"""Indices in ANSWERS of the answers whose tool calls OpenAI's package refuses to parse."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SYSTEM = "You are a clerk."


class Weather(BaseModel):
    """The weather of a city."""

    city: str


@dataclass
class ScriptedScheduler(FakeScheduler):
    """Answers each sequence with the next text of `script`."""

    script: Iterator[list[int]] = field(default_factory=lambda: iter(()))
    begun: dict[int, tuple[Sequence, list[int]]] = field(default_factory=dict)

    def opened(self) -> scheduler_pb2.SessionOpened:
        opened = super().opened()
        opened.vocab_size = 1000
        return opened

    def token_at(self, sequence: Sequence, position: int) -> int:
        if id(sequence) not in self.begun:
            self.begun[id(sequence)] = sequence, next(self.script)
        _, answer = self.begun[id(sequence)]
        return answer[position] if position < len(answer) else 0


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    model = write_tokenizer(tmp_path / "tiny", chat_template=TEMPLATE, texts=ANSWERS, size=1000)
    scheduler = ScriptedScheduler(max_model_len=65_536, max_request_tokens=65_000)
    async with serving(
        model,
        scheduler,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
    ) as running:
        scheduler.script = cycle([running.tokens(text) for text in ANSWERS])
        yield running


def turns(served: Serving) -> Iterator[int]:
    for turn in range(NUM_TURNS):
        if len(served.scheduler.adds) < NUM_TURNS:
            yield turn


def check_day(served: Serving) -> None:
    """Asserts that the last prompt has the user's and the tools' texts from all turns."""
    (last,) = served_prompts(served)[-1:]
    said = [int(number) for number in re.findall(r"user:turn (\d+)\.", last)]
    assert said == list(range(len(said)))
    assert len(served.scheduler.adds) >= NUM_TURNS
    assert len(said) >= NUM_TURNS // 4
    assert "Sunny in Rome." in last
    assert last.count("tool:sunny") >= NUM_TURNS // len(ANSWERS)


def is_broken(turn: int) -> bool:
    return turn % len(ANSWERS) in BROKEN_ANSWERS


async def test_openais_package_over_chat(served: Serving) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Weather, name="weather")]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    async with served.openai() as client:
        completions = client.chat.completions
        for turn in turns(served):
            messages.append({"role": "user", "content": f"turn {turn}."})
            ask: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": tools}
            if turn % 3 == 0 or is_broken(turn):
                answer = (await completions.create(**ask)).choices[0].message
            elif turn % 3 == 1:
                async with completions.stream(**ask) as stream:
                    answer = (await stream.get_final_completion()).choices[0].message
            else:
                answer = (await completions.parse(**ask)).choices[0].message
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in answer.tool_calls or ()
            ]
    check_day(served)


async def test_openais_package_over_responses(served: Serving) -> None:
    tools: list[Any] = [
        {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    ]
    items: list[Any] = []
    async with served.openai() as client:
        for turn in turns(served):
            items.append({"role": "user", "content": f"turn {turn}."})
            ask: dict[str, Any] = {"model": "tiny", "input": items, "tools": tools}
            ask |= {"instructions": SYSTEM, "store": False}
            if turn % 2 or is_broken(turn):
                answer = await client.responses.create(**ask)
            else:
                async with client.responses.stream(**ask) as stream:
                    answer = await stream.get_final_response()
            items += answer.output
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
                for item in answer.output
                if item.type == "function_call"
            ]
    check_day(served)


async def test_anthropics_package_with_what_claude_code_sends(served: Serving) -> None:
    headers = {
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,"
        "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
        "x-app": "cli",
        "User-Agent": "claude-cli/2.1.0 (external, cli)",
        "X-Claude-Code-Session-Id": "6a8c3e5e-7f4f-4a77-a3b3-3a0f8a0d5f11",
    }
    cached = {"type": "ephemeral", "ttl": "1h"}
    tool = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
    fields: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 400,
        "system": [{"type": "text", "text": SYSTEM, "cache_control": cached}],
        "tools": [tool | {"defer_loading": True, "eager_input_streaming": True}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "user_1_account__session_2"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        },
        "extra_headers": headers,
    }
    messages: list[Any] = []
    results: list[Any] = []
    async with served.anthropic() as client:
        for turn in turns(served):
            text = {"type": "text", "text": f"turn {turn}.", "cache_control": cached}
            messages.append({"role": "user", "content": [*results, text]})
            if turn % 2:
                answer = await client.messages.create(messages=messages, **fields)
            else:
                async with client.messages.stream(messages=messages, **fields) as stream:
                    answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            for block in answer.content:
                assert block.type != "tool_use" or isinstance(block.input, dict)
    check_day(served)


async def test_openais_agents_sdk(served: Serving) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny{city[:0]}"

    async with served.openai() as client:
        agent = agents.Agent(
            name="clerk",
            instructions=SYSTEM,
            tools=[weather],
            model=agents.OpenAIResponsesModel(model="tiny", openai_client=client),
        )
        items: list[Any] = []
        for turn in turns(served):
            items.append({"role": "user", "content": f"turn {turn}."})
            result = await agents.Runner.run(agent, items, max_turns=20)
            items = result.to_input_list()
    check_day(served)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_langchain(served: Serving, api: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages_of = pytest.importorskip("langchain_core.messages")
    with openai.DefaultHttpxClient(verify=False) as plain:
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            model = langchain_openai.ChatOpenAI(
                model="tiny",
                base_url=f"{served.base_url}/v1",
                api_key="none",
                max_retries=0,
                use_responses_api=api == "responses",
                http_client=plain,
                http_async_client=http,
            ).bind_tools([Weather])
            messages: list[Any] = [messages_of.SystemMessage(SYSTEM)]
            for turn in turns(served):
                messages.append(messages_of.HumanMessage(f"turn {turn}."))
                if turn % 2:
                    answer = await model.ainvoke(messages)
                else:
                    chunks = [chunk async for chunk in model.astream(messages)]
                    answer = chunks[0]
                    for chunk in chunks[1:]:
                        answer += chunk
                messages.append(answer)
                messages += [
                    messages_of.ToolMessage("sunny", tool_call_id=call["id"])
                    for call in (*answer.tool_calls, *answer.invalid_tool_calls)
                ]
    check_day(served)


async def test_pydantic_ai(served: Serving) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    async with served.openai() as client:
        provider = providers.OpenAIProvider(openai_client=client)
        model = models.OpenAIChatModel("tiny", provider=provider)
        agent: Any = pydantic_ai.Agent(model, system_prompt=SYSTEM, retries=9)

        @agent.tool_plain
        def weather(city: str) -> str:
            return f"sunny{city[:0]}"

        history: list[Any] = []
        for turn in turns(served):
            result = await agent.run(f"turn {turn}.", message_history=history)
            history = result.all_messages()
    check_day(served)


@pytest.mark.filterwarnings("ignore")
async def test_litellm_in_front(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in turns(served):
        messages.append({"role": "user", "content": f"turn {turn}."})
        answer = await litellm.acompletion(
            model="openai/tiny",
            api_base=f"{served.base_url}/v1",
            api_key="none",
            messages=messages,
            tools=[tool],
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            for call in message.tool_calls or ()
        ]
    check_day(served)
