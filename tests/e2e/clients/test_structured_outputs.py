"""Tests structured outputs with all services and the demo model: streamed and not streamed, in a
batch with other requests, and preempted. tests/e2e/replicas/test_composition.py tests them on two
ranks, and after kills.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.stack import ROOT, Stack
from tests.plain_http import async_http_client
from tests.structured_forms import FORMS, PERSON

PROMPT = "class Point:"
MAX_TOKENS = 400
BESIDE_TOKENS = 200
"""The limit of answers that are compared with the same answers alone."""
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} (\d+)", re.MULTILINE)


@pytest.fixture
async def http(demo_replicas: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with async_http_client(base_url=demo_replicas.url, timeout=100) as client:
        yield client


def body(seed: int, **others: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": seed, **others}


async def ask(http: httpx.AsyncClient, wanted: dict[str, Any]) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=wanted)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


async def stream(http: httpx.AsyncClient, wanted: dict[str, Any]) -> dict[str, Any]:
    """Like `ask`, but streamed."""
    text, finish = "", None
    async with http.stream("POST", "/v1/completions", json={**wanted, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                assert "error" not in piece, piece
                text += piece["choices"][0]["text"]
                finish = piece["choices"][0]["finish_reason"] or finish
    return {"text": text, "finish_reason": finish}


def check(name: str, answer: dict[str, Any]) -> None:
    """Asserts that an answer conforms to the structured output `name`. Only an answer that was cut
    off at its maximum length may be incomplete.
    """
    assert answer["finish_reason"] in ("stop", "length")
    if answer["finish_reason"] == "stop":
        assert FORMS[name].accepts(answer["text"]), (name, answer["text"])


@pytest.mark.parametrize("name", FORMS)
async def test_an_answer_has_its_form_streamed_and_whole(
    name: str, http: httpx.AsyncClient
) -> None:
    ended = 0
    for seed in range(3):
        wanted = body(seed, structured_outputs=FORMS[name].sent)
        whole = await ask(http, wanted)
        check(name, whole)
        streamed = await stream(http, wanted)
        assert streamed["text"] == whole["text"]
        assert streamed["finish_reason"] == whole["finish_reason"]
        ended += whole["finish_reason"] == "stop"
    assert ended


async def preemptions(http: httpx.AsyncClient) -> int:
    found = PREEMPTIONS.findall((await http.get("/metrics")).text)
    return sum(map(int, found))


async def test_preempted_and_beside_others_each_answer_is_the_one_that_it_is_alone(
    http: httpx.AsyncClient,
) -> None:
    wanted = [
        body(seed, max_tokens=BESIDE_TOKENS, structured_outputs=FORMS[name].sent)
        for seed, name in enumerate([*FORMS, "person", "person", "person"])
    ]
    # At least three of these five run at one replica, whose KV cache does not fit all three.
    wanted += [body(seed, ignore_eos=True) for seed in range(5)]
    alone = [await ask(http, one) for one in wanted]
    before = await preemptions(http)
    together = await asyncio.gather(*(ask(http, one) for one in wanted))
    assert await preemptions(http) > before
    assert [answer["text"] for answer in together] == [answer["text"] for answer in alone]
    for name, answer in zip(FORMS, together, strict=False):
        check(name, answer)


async def test_openais_client_gets_what_its_response_format_asks_for(demo_replicas: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_replicas.url}/v1", api_key="none") as client:
        for response_format in (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            {"type": "json_object"},
        ):
            answer = await client.chat.completions.create(
                model=demo_replicas.model,
                messages=[{"role": "user", "content": "who?"}],
                response_format=response_format,  # type: ignore[arg-type]
                max_completion_tokens=300,
                seed=1,
            )
            (choice,) = answer.choices
            assert choice.message.content is not None
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
            else:
                assert choice.message.content.startswith("{")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=demo_replicas.model,
                messages=[{"role": "user", "content": "who?"}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"not": {}}},
                },
            )
        assert refused.value.param == "response_format"


async def test_documented_examples_are_answered_as_documented(http: httpx.AsyncClient) -> None:
    section = (ROOT / "docs" / "sampling.md").read_text().partition("## Structured outputs")[2]
    examples = [json.loads(line) for line in re.findall(r"^\{.*\}$", section, re.MULTILINE)]
    assert {form for example in examples for form in example["structured_outputs"]} == {
        *("json", "regex", "choice", "grammar")
    }
    for example in examples:
        answer = await ask(http, example)
        assert answer["finish_reason"] == "stop", (example, answer)
        form, of = next(iter(example["structured_outputs"].items()))
        text = answer["text"]
        if form == "json":
            person = json.loads(text)
            assert isinstance(person["name"], str)
            assert person["age"] >= 0
        elif form == "regex":
            assert re.fullmatch(of, text)
        elif form == "choice":
            assert text in of
        else:
            assert FORMS["gbnf"].accepts(text)
