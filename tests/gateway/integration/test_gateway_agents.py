"""Agents of other projects, unchanged, that call tools through the gateway: the model's answers are
replayed, the tools are called in this process.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.integration.test_gateway_tools import TEMPLATE, served_prompts
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

CALL = (
    "<think>\nI need the weather.\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
)
ANSWER = "Sunny in Rome."
APIS = ["chat", "responses"]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    model = write_tokenizer(tmp_path / "tiny", chat_template=TEMPLATE)
    scheduler = FakeScheduler(max_model_len=4096, max_request_tokens=4000)
    async with serving(
        model,
        scheduler,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
    ) as running:
        scheduler.answer = running.tokens(CALL)
        yield running


def check_turns(served: Serving, calls: list[tuple[str, int]], api: str) -> None:
    """The tool was called once as the model asked, and the model got what it gave."""
    assert calls == [("Rome", 2)]
    first, second = served_prompts(served)
    assert "[weather]" in first
    assert "weather city=Rome days=2)" in second
    prefix = "call_" if api == "responses" else "chatcmpl-tool-"
    assert f"tool:sunny#{prefix}" in second


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_agent_of_pydantic_ai_calls_its_tool_and_answers(
    served: Serving, is_streamed: bool, api: str
) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    calls: list[tuple[str, int]] = []
    async with served.openai() as client:
        provider = providers.OpenAIProvider(openai_client=client)
        kind = models.OpenAIResponsesModel if api == "responses" else models.OpenAIChatModel
        agent: Any = pydantic_ai.Agent(kind("tiny", provider=provider))

        @agent.tool_plain
        def weather(city: str, days: int) -> str:
            calls.append((city, days))
            served.scheduler.answer = served.tokens(ANSWER)
            return "sunny"

        if is_streamed:
            async with agent.run_stream("the weather?") as result:
                output = await result.get_output()
        else:
            output = (await agent.run("the weather?")).output
    assert output == ANSWER
    check_turns(served, calls, api)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_agent_of_langchain_calls_its_tool_and_answers(
    served: Serving, is_streamed: bool, api: str
) -> None:
    agents = pytest.importorskip("langchain.agents")
    langchain_openai = pytest.importorskip("langchain_openai")
    calls: list[tuple[str, int]] = []

    def weather(city: str, days: int) -> str:
        """The weather of the next days."""
        calls.append((city, days))
        served.scheduler.answer = served.tokens(ANSWER)
        return "sunny"

    with openai.DefaultHttpxClient(verify=False) as plain:
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            model = langchain_openai.ChatOpenAI(
                model="tiny",
                base_url=f"{served.base_url}/v1",
                api_key="none",
                max_retries=0,
                streaming=is_streamed,
                use_responses_api=api == "responses",
                http_client=plain,
                http_async_client=http,
            )
            agent = agents.create_agent(model, [weather])
            state = await agent.ainvoke({"messages": [{"role": "user", "content": "so?"}]})
    assert state["messages"][-1].text == ANSWER
    check_turns(served, calls, api)
