"""The text of chat answers: how it begins, and what special tokens become."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import SPECIAL, write_tokenizer

ASK: list[Any] = [{"role": "user", "content": "hi"}]
CLOSED = "<think>\nab\n</think>\n\nThe ans"
USER, END = "<|user|>", SPECIAL[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


def serving_with(model: Path, reasoning: str) -> Any:
    return serving(
        model,
        FakeScheduler(max_model_len=4096, max_request_tokens=4000),
        tool_call_parser="hermes",
        reasoning_parser=reasoning,
        enable_auto_tool_choice=True,
    )


async def chat(served: Serving, **body: Any) -> dict[str, Any]:
    answer = await served.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return {name: message.get(name) for name in ("content", "reasoning", "tool_calls")}


async def blocks(served: Serving, *turn: dict[str, Any] | str) -> list[tuple[str, str]]:
    content = turn[0] if isinstance(turn[0], str) else turn
    messages = [*ASK, {"role": "assistant", "content": content}]
    answer = await served.http.post("/v1/messages", json={"messages": messages, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    return [(one["type"], one[one["type"]]) for one in answer.json()["content"]]


@pytest.mark.parametrize("reasoning", ["deepseek_r1", "qwen3"])
async def test_an_answer_that_is_continued_begins_where_its_turn_left_off(
    model: Path, reasoning: str
) -> None:
    async with serving_with(model, reasoning) as served:
        served.scheduler.answer = served.tokens("wer")
        for content, structured, begins in (
            (CLOSED, None, "content"),
            (CLOSED, {"regex": "wer"}, "content"),
            ("<think>\nab", None, "reasoning"),
            ("<think>\nab", {"regex": "wer"}, "reasoning"),
        ):
            turn = {"role": "assistant", "content": content}
            ask = {"messages": [*ASK, turn], "continue_final_message": True}
            ask |= {"add_generation_prompt": False, "structured_outputs": structured}
            message = await chat(served, **ask)
            assert message[begins] == "wer"
            sampling = served.scheduler.adds[-1].sampling
            assert sampling.HasField("structured_outputs") == (structured is not None)
            if structured is not None and begins == "content":
                assert sampling.structured_outputs.text == "wer"
        assert await blocks(served, CLOSED) == [("text", "wer")]
        assert await blocks(served, "<think>\nab") == [("thinking", "wer")]
        thought = {"type": "thinking", "thinking": "ab", "signature": ""}
        assert await blocks(served, thought, {"type": "text", "text": "The ans"}) == [
            ("text", "wer")
        ]


async def test_special_tokens_that_are_no_marks_of_the_format_are_skipped(model: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "b%s"}}</tool_call>'
    said = f"<think>h%sm</think>y%ses{call}"
    async with serving_with(model, "qwen3") as served:
        served.scheduler.answer = served.tokens(said % ((USER,) * 3))
        tools = [{"type": "function", "function": {"name": "f"}}]
        for shown in ("", USER):
            ask: dict[str, Any] = {"tools": tools}
            ask |= {"skip_special_tokens": False} if shown else {}
            message = await chat(served, **ask)
            assert message["reasoning"] == f"h{shown}m"
            assert message["content"] == f"y{shown}es"
            (called,) = message["tool_calls"]
            assert json.loads(called["function"]["arguments"]) == {"a": f"b{shown}"}
            lines = (
                await served.http.post(
                    "/v1/chat/completions", json={"messages": ASK, "stream": True, **ask}
                )
            ).text.splitlines()
            deltas = [
                json.loads(line[6:])["choices"][0]["delta"] for line in lines if "delta" in line
            ]
            for name in ("reasoning", "content"):
                assert "".join(d.get(name) or "" for d in deltas) == message[name]


async def test_marks_that_are_special_tokens_are_read_and_others_skipped(tmp_path: Path) -> None:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    directory = write_tokenizer(tmp_path / "tiny", special=(*SPECIAL, *marks))
    async with serving_with(directory, "qwen3") as served:
        text = f"<think>h{USER}m</think>yes{USER}<tool_call>{{{USER}}}</tool_call>"
        served.scheduler.answer = served.tokens(text)
        assert await chat(served) == {"content": "yes{}", "reasoning": "hm", "tool_calls": None}
