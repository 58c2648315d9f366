"""Tests the HTTP API through the `openai` package and through plain HTTP."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.stack import Stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, http_client=http
    ) as client:
        yield client


def test_the_command_of_the_ready_line_streams_a_completion(stack: Stack) -> None:
    line = next(line for line in stack.output if "curl" in line)
    address = line.split()[2]
    body = json.loads(line.partition(" -d '")[2].removesuffix("'"))

    with httpx.stream("POST", address, json=body) as response:
        lines = [line for line in response.iter_lines() if line]

    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_chat_is_as_long_as_asked_for_and_its_usage_adds_up(
    client: openai.OpenAI, stack: Stack
) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_has_the_text_of_a_whole_one(client: openai.OpenAI, stack: Stack) -> None:
    whole = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=30,
        temperature=0,
    )
    chunks = list(
        client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_that_repeats_itself_ends(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.completions.create(
        model=stack.model,
        prompt="hello",
        max_tokens=50,
        extra_body={
            "allowed_token_ids": [65],
            "repetition_detection": {"max_pattern_size": 2, "min_count": 5},
        },
    )
    (choice,) = answer.choices
    said = choice.model_dump()
    assert (said["finish_reason"], said["stop_reason"]) == ("repetition", "repetition_detected")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_two_answers_to_one_prompt(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.completions.create(
        model=stack.model, prompt="once upon a time", n=2, max_tokens=16, seed=1, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text


def test_logprobs_of_a_chat(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        # A greedy token is the most probable token.
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.logprob <= 0


def test_a_repeated_prompt_is_counted_as_cached(client: openai.OpenAI, stack: Stack) -> None:
    prompt = "what was asked before is not computed again, block by block " * 3
    for _ in range(2):
        answer = client.completions.create(model=stack.model, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > 100
