"""/render, /inference/v1/generate and /derender together return the answer of a completion."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from tests.gateway.documented import Documented
from tests.gateway.model_outputs import RECORDED, SCHEMAS, Recorded
from tests.gateway.serving import Serving, serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}A:"
)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=TEMPLATE)


async def post(hermes: Serving, path: str, body: Any) -> Any:
    answer = await hermes.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def compared(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion without the parts that differ between two answers to the same request."""
    for choice in completion["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    completion["usage"].pop("prompt_tokens_details")
    kept = ("choices", "usage", "model", "object")
    return {name: completion[name] for name in kept}


async def by_tokens(hermes: Serving, body: dict[str, Any]) -> dict[str, Any]:
    rendered = await post(hermes, f"{CHAT}/render", body)
    generated = await post(hermes, GENERATE, rendered)
    whole = await post(
        hermes, f"{CHAT}/derender", {"generate_response": generated, "chat_request": body}
    )
    assert whole["id"] == generated["request_id"]
    return compared(whole)


@pytest.mark.parametrize(
    "recorded",
    [one for one in RECORDED if one.format in ("hermes", "openai", "qwen3_coder")],
    ids=lambda one: one.format,
)
async def test_recorded_answers_are_read_as_by_a_chat(calling: Path, recorded: Recorded) -> None:
    async with serving_with(calling, recorded.format, recorded.thinks) as hermes:
        hermes.scheduler.answer = hermes.tokens(recorded.text)
        body = {**ASK, "tools": TOOLS}
        whole = compared(await post(hermes, CHAT, body))
        assert await by_tokens(hermes, body) == whole


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["e", "a"]},
        {"tools": TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}, "top_k": 5, "min_tokens": 2},
        {"logit_bias": {"5": 3}, "bad_words": ["he"], "return_token_ids": True},
        {"truncate_prompt_tokens": 3, "return_token_offsets": True},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
async def test_a_chat_by_tokens_is_the_chat(hermes: Serving, more: dict[str, Any]) -> None:
    body = {**ASK, "seed": 7, "max_tokens": 12, **more}
    whole = await post(hermes, CHAT, body)
    asked = hermes.scheduler.adds[-1]
    assert await by_tokens(hermes, body) == compared(whole)
    again = hermes.scheduler.adds[-1]
    assert again.prompt_token_ids == asked.prompt_token_ids
    assert again.sampling == asked.sampling


async def test_a_completion_of_several_prompts(hermes: Serving) -> None:
    body: dict[str, Any] = {
        "prompt": ["the well", "a step"],
        "n": 2,
        "temperature": 0,
        "logprobs": 1,
    }
    rendered = await post(hermes, f"{COMPLETIONS}/render", body)
    assert [one["token_ids"] for one in rendered] == [*map(hermes.tokens, body["prompt"])]
    generated = [await post(hermes, GENERATE, one) for one in rendered]
    derendered = await post(
        hermes,
        f"{COMPLETIONS}/derender",
        {"generate_responses": generated, "completion_request": body},
    )
    texts = [
        (await post(hermes, "/detokenize", {"tokens": choice["token_ids"]}))["prompt"]
        for one in generated
        for choice in one["choices"]
    ]
    assert [choice["text"] for choice in derendered["choices"]] == texts
    assert all(choice["logprobs"]["tokens"] for choice in derendered["choices"])


async def test_offsets_say_where_in_the_text_each_token_is(hermes: Serving) -> None:
    text = "the well"
    asked = {"prompt": text, "return_token_offsets": True}
    [rendered] = await post(hermes, f"{COMPLETIONS}/render", asked)
    offsets = rendered["token_offsets"]
    assert len(offsets) == len(rendered["token_ids"])
    assert "".join(text[first:last] for first, last in offsets) == text
    for prompt in ([5, 6], [[5]]):
        [rendered] = await post(hermes, f"{COMPLETIONS}/render", {**asked, "prompt": prompt})
        assert rendered["token_offsets"] is None
    chat = await post(hermes, f"{CHAT}/render", {**ASK, "return_token_offsets": True})
    assert len(chat["token_offsets"]) == len(chat["token_ids"])


async def test_tokens_without_a_request_are_text(hermes: Serving) -> None:
    text = "<think>hm</think>the well"
    choice = {"index": 0, "token_ids": hermes.tokens(text), "finish_reason": "length"}
    response = {"request_id": "r-1", "choices": [choice]}
    chat = await post(
        hermes, f"{CHAT}/derender", {"generate_response": response, "prompt_tokens": 3}
    )
    assert chat["choices"][0]["message"]["content"] == text
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["prompt_tokens"]) == ("length", 3)
    whole = await post(hermes, f"{COMPLETIONS}/derender", {"generate_responses": [response]})
    assert (whole["id"], whole["choices"][0]["text"]) == ("r-1", text)


GENERATED: dict[str, Any] = {"request_id": "r", "choices": [{"index": 0, "token_ids": [5]}]}
TOO_LARGE = {
    **GENERATED["choices"][0],
    "logprobs": {"content": [{"token_id": 5, "logprob": 1e300, "top_logprobs": []}]},
}
"""A choice with a log-probability that would become infinity in an answer."""


async def test_answers_are_as_documented(hermes: Serving) -> None:
    document = Documented((await hermes.http.get("/openapi.json")).json())
    for path, body in {
        f"{COMPLETIONS}/render": {"prompt": ["a", "b"], "return_token_offsets": True},
        f"{CHAT}/render": {**ASK, "stream": True, "stream_options": {"include_usage": True}},
        f"{COMPLETIONS}/derender": {"generate_responses": [GENERATED]},
        f"{CHAT}/derender": {"generate_response": GENERATED, "chat_request": ASK},
    }.items():
        answer = await hermes.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        document.check(path, answer)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (f"{COMPLETIONS}/render", {"prompt": "a", "echo": True}, "echo"),
        (f"{COMPLETIONS}/render", {"prompt": "a", "best_of": 3}, "best_of"),
        (f"{COMPLETIONS}/render", {"prompt": ""}, "prompt"),
        (f"{CHAT}/render", {**ASK, "thinking_token_budget": 5}, "thinking_token_budget"),
        (f"{CHAT}/render", {**ASK, "max_tokens": 5000}, "max_tokens"),
        (f"{CHAT}/derender", {"generate_response": GENERATED, "stream": True}, "stream"),
        (
            f"{CHAT}/derender",
            {"generate_response": GENERATED, "chat_request": {**ASK, "tool_choice": "required"}},
            "chat_request.tool_choice",
        ),
        (
            f"{CHAT}/derender",
            {"generate_response": {**GENERATED, "choices": [{"index": 1}]}},
            "generate_response",
        ),
        (
            f"{CHAT}/derender",
            {"generate_response": {**GENERATED, "choices": [TOO_LARGE]}},
            "generate_response.choices[0].logprobs.content[0].logprob",
        ),
        (
            f"{COMPLETIONS}/derender",
            {"generate_responses": [GENERATED], "completion_request": {"prompt": ["a", "b"]}},
            "generate_responses",
        ),
        (f"{COMPLETIONS}/derender", {"generate_responses": []}, "generate_responses"),
    ],
)
async def test_what_is_wrong_is_named(
    hermes: Serving, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await hermes.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_tokenizer_info_is_served_where_it_is_enabled(calling: Path, hermes: Serving) -> None:
    assert (await hermes.http.get("/tokenizer_info")).status_code == 404
    async with serving(calling, enable_tokenizer_info_endpoint=True) as enabled:
        answer = await enabled.http.get("/tokenizer_info")
        document = (await enabled.http.get("/openapi.json")).json()
    info = answer.json()
    assert (answer.status_code, info["chat_template"]) == (200, TEMPLATE)
    Draft202012Validator(document["components"]["schemas"]["TokenizerInfo"]).validate(info)
    assert "/tokenizer_info" in document["paths"]
    written = json.loads((calling / "tokenizer_config.json").read_text())
    assert info["eos_token"] == written["eos_token"]
    assert str(calling) not in answer.text
