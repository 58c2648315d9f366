"""Every field that the `openai` package can send is handled in one of three ways: it has an effect,
it has none because it requests the default behaviour, or it is refused by name. docs/http-api.md
has the same table.

The test fails if a new version of the package adds a field.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params

from services.gateway.adapters.http.openai.bodies import EmbeddingBody
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving

DOCUMENT = Path(__file__).parents[4] / "docs" / "http-api.md"


@dataclass(frozen=True)
class Honoured:
    """A field with an effect: each body changes the message to the scheduler or the answer."""

    bodies: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class NoEffect:
    """A field whose values in `accepted` have no effect. Values in `refused` are refused."""

    accepted: tuple[Any, ...]
    refused: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A field whose `values` are all refused."""

    values: tuple[Any, ...]


Handling = Honoured | NoEffect | Refused


def honoured(*bodies: dict[str, Any]) -> Honoured:
    return Honoured(bodies)


def no_effect(*accepted: Any, refused: tuple[Any, ...] = ()) -> NoEffect:
    return NoEffect(accepted, refused)


def refused(*values: Any) -> Refused:
    return Refused(values)


COMPLETION = {"model": "tiny", "prompt": "the", "max_tokens": 6, "seed": 3}
COMPLETIONS: dict[str, Handling] = {
    "model": refused("another"),
    "prompt": honoured({"prompt": "hello"}, {"prompt": ["hello", "the"]}, {"prompt": [5, 6]}),
    "best_of": honoured({"best_of": 3}),
    "echo": honoured({"echo": True}),
    "frequency_penalty": honoured({"frequency_penalty": 0.5}),
    "logit_bias": honoured({"logit_bias": {"5": -100}}),
    "logprobs": honoured({"logprobs": 2}),
    "max_tokens": honoured({"max_tokens": 2}),
    "n": honoured({"n": 2}),
    "presence_penalty": honoured({"presence_penalty": 0.5}),
    "seed": honoured({"seed": 4}),
    "stop": honoured({"stop": "STOP"}, {"stop": ["STOP"]}),
    "stream": honoured({"stream": True}),
    "stream_options": honoured({"stream": True, "stream_options": {"include_usage": True}}),
    "suffix": no_effect("", refused=("text",)),
    "temperature": honoured({"temperature": 0.5}),
    "top_p": honoured({"top_p": 0.5}),
    "user": no_effect("someone"),
}

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "seed": 3}
REQUIRED = {"tools": [TOOL], "tool_choice": "required"}
CHATS: dict[str, Handling] = {
    "messages": honoured({"messages": [{"role": "user", "content": "the"}]}),
    "model": refused("another"),
    "audio": refused({"format": "wav", "voice": "alloy"}),
    "frequency_penalty": honoured({"frequency_penalty": 0.5}),
    "function_call": no_effect("none", refused=("auto", {"name": "f"})),
    "functions": no_effect([], refused=([{"name": "f"}],)),
    "logit_bias": honoured({"logit_bias": {"5": -100}}),
    "logprobs": honoured({"logprobs": True}),
    "max_completion_tokens": honoured({"max_tokens": None, "max_completion_tokens": 2}),
    "max_tokens": honoured({"max_tokens": 2}),
    "metadata": no_effect({"a": "b"}),
    "modalities": no_effect(["text"], [], refused=(["text", "audio"],)),
    "moderation": refused({"model": "omni-moderation-latest"}),
    "n": honoured({"n": 2}),
    "parallel_tool_calls": honoured({**REQUIRED, "parallel_tool_calls": False}),
    "prediction": refused({"type": "content", "content": "a"}),
    "presence_penalty": honoured({"presence_penalty": 0.5}),
    "prompt_cache_key": honoured({"prompt_cache_key": "session"}),
    "prompt_cache_options": honoured({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}),
    "prompt_cache_retention": honoured({"prompt_cache_retention": "24h"}),
    "reasoning_effort": no_effect("none", "low", "max", refused=("huge",)),
    "response_format": honoured(
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": True, "schema": {"type": "boolean"}},
            }
        },
    ),
    "safety_identifier": no_effect("someone"),
    "seed": honoured({"seed": 4}),
    "service_tier": no_effect("auto", "default", refused=("flex", "priority", "fast")),
    "stop": honoured({"stop": "STOP"}, {"stop": ["STOP"]}),
    "store": no_effect(False, refused=(True,)),
    "stream": honoured({"stream": True}),
    "stream_options": honoured({"stream": True, "stream_options": {"include_usage": True}}),
    "temperature": honoured({"temperature": 0.5}),
    "tool_choice": honoured(REQUIRED, {**REQUIRED, "tool_choice": TOOL}),
    "tools": honoured(REQUIRED),
    "top_logprobs": honoured({"logprobs": True, "top_logprobs": 2}),
    "top_p": honoured({"top_p": 0.5}),
    "user": no_effect("someone"),
    "verbosity": no_effect("medium", "low", "high"),
    "web_search_options": refused({}),
}

ASSISTANT: dict[str, Handling] = {
    "role": refused("function"),
    "content": honoured({"content": "the"}, {"content": [{"type": "text", "text": "the"}]}),
    "audio": refused({"id": "a"}),
    "function_call": refused({"name": "f", "arguments": "{}"}),
    "name": honoured({"name": "someone"}),
    "refusal": no_effect("no"),
    "tool_calls": no_effect([], refused=("f",)),
}
OTHER_ROLES: dict[str, Handling] = {name: ASSISTANT[name] for name in ("role", "content", "name")}
TEXT_PART: dict[str, Handling] = {
    "type": refused("image_url", "input_audio", "file"),
    "text": honoured({"text": "the"}),
    "prompt_cache_breakpoint": honoured({"prompt_cache_breakpoint": {"mode": "explicit"}}),
}
STREAM_OPTIONS: dict[str, Handling] = {
    "include_usage": honoured({"include_usage": True}),
    "include_obfuscation": no_effect(False, refused=(True,)),
}


def fields(*params: Any) -> set[str]:
    return set().union(*(each.__required_keys__ | each.__optional_keys__ for each in params))


@pytest.mark.parametrize(
    ("table", "params"),
    [
        (
            COMPLETIONS,
            (
                completion_create_params.CompletionCreateParamsNonStreaming,
                completion_create_params.CompletionCreateParamsStreaming,
            ),
        ),
        (
            CHATS,
            (
                chat_params.CompletionCreateParamsNonStreaming,
                chat_params.CompletionCreateParamsStreaming,
            ),
        ),
        (ASSISTANT, (ChatCompletionAssistantMessageParam,)),
        (
            OTHER_ROLES,
            (
                ChatCompletionDeveloperMessageParam,
                ChatCompletionSystemMessageParam,
                ChatCompletionUserMessageParam,
            ),
        ),
        (TEXT_PART, (ChatCompletionContentPartTextParam,)),
        (STREAM_OPTIONS, (ChatCompletionStreamOptionsParam,)),
    ],
    ids=["completions", "chat", "assistant", "other roles", "text part", "stream options"],
)
def test_the_package_has_no_other_fields(
    table: dict[str, Handling], params: tuple[Any, ...]
) -> None:
    assert set(table) == fields(*params)


async def effect(served: Serving, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    served.scheduler.adds.clear()
    sessions: list[str] = []
    fleet = served.gateway.fleet
    start = fleet.start

    def watched(requests: Any) -> Any:
        sessions.extend(request.session_id for request in requests)
        return start(requests)

    fleet.start = watched  # type: ignore[method-assign]
    try:
        response = await served.http.post(path, json={**body, "request_id": "same"})
    finally:
        del fleet.start  # type: ignore[misc]
    assert response.status_code == 200, response.text
    sent = []
    for add in served.scheduler.adds:
        add.ClearField("arrival_unix_nanos")
        add.ClearField("handle")
        sent.append(add.SerializeToString(deterministic=True))
    answer = re.sub(r'"created": ?\d+', "", response.text)
    return (sent, sessions, answer)


async def expect(
    served: Serving,
    path: str,
    base: dict[str, Any],
    name: str,
    handling: Handling,
    *where: str | int,
) -> None:
    """Sets the field `name` in `base`, or in the part of `base` at the path `where`, and asserts
    that it is handled as `handling` describes.
    """

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        if not where:
            return {**base, **values}
        whole = _copy(base)
        part: Any = whole
        for step in where:
            part = part[step]
        part.update(values)
        return whole

    match handling:
        case Honoured(bodies):
            plain = await effect(served, path, base)
            for body in bodies:
                assert await effect(served, path, changed(body)) != plain, (name, body)
        case NoEffect(accepted):
            plain = await effect(served, path, base)
            for value in accepted:
                assert await effect(served, path, changed({name: value})) == plain, (name, value)
    for value in _refused_values(handling):
        response = await served.http.post(path, json=changed({name: value}))
        status = 404 if name == "model" else 400
        assert response.status_code == status, (name, value, response.text)
        param = response.json()["error"]["param"]
        assert param.rpartition(".")[2] == name, (name, value, param)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _refused_values(handling: Handling) -> tuple[Any, ...]:
    match handling:
        case NoEffect(_, values) | Refused(values):
            return values
    return ()


async def stop_in(served: Serving, path: str, base: dict[str, Any]) -> str:
    """A stop string that ends the answer to `base` early."""
    choice = (await served.http.post(path, json=base)).json()["choices"][0]
    text: str = choice.get("text") or choice["message"]["content"]
    return text[1:2]


async def expect_table(
    served: Serving, path: str, base: dict[str, Any], table: dict[str, Handling]
) -> None:
    stop = await stop_in(served, path, base)
    for name, handling in table.items():
        if name == "stop":
            handling = honoured({"stop": stop}, {"stop": [stop]})  # noqa: PLW2901
        plain = base
        if name == "stream_options":
            plain = {**base, "stream": True}
        await expect(served, path, plain, name, handling)


async def test_each_field_of_completions_is_handled_as_its_table_says(served: Serving) -> None:
    await expect_table(served, "/v1/completions", COMPLETION, COMPLETIONS)


async def test_each_field_of_chat_completions_is_handled_as_its_table_says(served: Serving) -> None:
    await expect_table(served, "/v1/chat/completions", CHAT, CHATS)


async def test_each_field_of_a_message_is_handled_as_its_table_says(served: Serving) -> None:
    path = "/v1/chat/completions"
    for role in ("assistant", "user", "system", "developer"):
        base = {**CHAT, "messages": [{"role": role, "content": "hi"}, *MESSAGES]}
        for name, handling in (ASSISTANT if role == "assistant" else OTHER_ROLES).items():
            if name != "name":  # the chat template does not read the field `name`
                await expect(served, path, base, name, handling, "messages", 0)


async def test_fields_of_parts_and_stream_options_are_handled_as_their_tables_say(
    served: Serving,
) -> None:
    path = "/v1/chat/completions"
    part = {"type": "text", "text": "hi"}
    base = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    for name, handling in TEXT_PART.items():
        await expect(served, path, base, name, handling, "messages", 0, "content", 0)
    base = {**CHAT, "stream": True, "stream_options": {"include_usage": False}}
    for name, handling in STREAM_OPTIONS.items():
        await expect(served, path, base, name, handling, "stream_options")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_name_unknown_fields_which_have_no_effect(
    served: Serving, *, stream: bool
) -> None:
    paths = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": CHAT,
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 6, "seed": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 6, "seed": 3},
    }
    for path, base in paths.items():
        body = {**base, "stream": stream, "request_id": "same"}
        plain = await served.http.post(path, json=body)
        assert "x-stepwell-ignored-fields" not in plain.headers
        response = await served.http.post(path, json={**body, "something": None, "é": 1})
        assert response.headers["x-stepwell-ignored-fields"] == "something, %C3%A9"
        assert len(response.text) == len(plain.text)
        refused = await served.http.post(path, json={**body, "something": 1, "temperature": -1})
        assert refused.status_code == 400
        assert refused.headers["x-stepwell-ignored-fields"] == "something"


async def test_unknown_fields_are_refused_by_name_where_that_is_set(model: Path) -> None:
    async with serving(model, FakeScheduler(), unknown_fields="refuse") as served:
        response = await served.http.post("/v1/completions", json={**COMPLETION, "another": None})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"]) == ("another", "unknown_parameter")


def test_the_documentation_has_the_same_table() -> None:
    documented: dict[str, dict[str, set[str]]] = {}
    for api, how, names in re.findall(
        r"^\| (completions|chat) \| (honoured|no effect|refused) \| (.*) \|$",
        DOCUMENT.read_text(),
        re.MULTILINE,
    ):
        documented.setdefault(api, {})[how] = set(re.findall(r"`(\w+)`(?!:)", names))
    words = {Honoured: "honoured", NoEffect: "no effect", Refused: "refused"}
    for api, table in (("completions", COMPLETIONS), ("chat", CHATS)):
        expected: dict[str, set[str]] = {}
        for name, handling in table.items():
            how = "honoured" if name == "model" else words[type(handling)]
            expected.setdefault(how, set()).add(name)
        assert documented[api] == expected


def test_every_field_of_embeddings_is_known() -> None:
    fields = EmbeddingCreateParams.__annotations__.keys()
    assert fields <= EmbeddingBody.model_fields.keys()
    said = DOCUMENT.read_text()
    assert all(f"`{name}`" in said for name in fields)
