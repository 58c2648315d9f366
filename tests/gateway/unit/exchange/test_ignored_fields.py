"""Unknown fields of request bodies are ignored, and named in the answer, or they are refused."""

import json
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.exchange.ignored_fields import IgnoredFieldLog, header_value
from services.gateway.adapters.http.exchange.parse import parse_body
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, CompletionBody

PROMPT = {"prompt": "hi"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


def ignored(body: dict[str, Any], kind: type = CompletionBody) -> tuple[str, ...]:
    return parse_body(json.dumps(body).encode(), kind)[1]


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (CompletionBody, PROMPT, ()),
        (CompletionBody, {**PROMPT, "b": 1, "a": {"c": 2}}, ("b", "a")),
        (CompletionBody, {**PROMPT, "something": None}, ("something",)),
        (
            ChatCompletionBody,
            {**MESSAGES, "stream_options": {"include_usge": True}},
            ("stream_options.include_usge",),
        ),
        (
            ChatCompletionBody,
            {**MESSAGES, "response_format": {"type": "text", "x": 1}},
            ("response_format.x",),
        ),
        (
            MessagesBody,
            {**MESSAGES, "max_tokens": 1, "thinking": {"type": "adaptive", "x": 1}},
            ("thinking.x",),
        ),
    ],
)
def test_unknown_fields_are_ignored_and_named(
    kind: type, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert ignored(body, kind) == names


def test_what_is_known_has_its_value_beside_an_unknown_field() -> None:
    raw = b'{"prompt": "hi", "temprature": 0.1, "top_p": 0.5, "stream_options": {"x": 1}}'
    body, _ = parse_body(raw, CompletionBody)
    assert (body.prompt, body.top_p, body.temperature) == ("hi", 0.5, None)


def test_a_wrong_field_is_refused_beside_unknown_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"^top_p: input should be a valid number$") as error:
        ignored({"unknown": 1, **PROMPT, "top_p": "high"})
    assert error.value.field == "top_p"


def test_a_known_field_that_is_not_served_is_refused_beside_unknown_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"^suffix is not supported"):
        ignored({"unknown": 1, **PROMPT, "suffix": "end"})


def test_unknown_fields_can_be_refused() -> None:
    raw = json.dumps({**PROMPT, "unknown": 1}).encode()
    with pytest.raises(InvalidArgument, match="unknown is no known parameter") as error:
        parse_body(raw, CompletionBody, ignores_unknown=False)
    assert error.value.error_reason == "UNKNOWN_PARAMETER"


def test_names_are_safe_in_a_header() -> None:
    [name] = ignored({**PROMPT, "a\r\nSet-Cookie: b=c, é": 1})
    assert name == "a%0D%0ASet-Cookie:%20b%3Dc%2C%20%C3%A9"
    [name] = ignored({**PROMPT, "x" * 1000: 1})
    assert name == "x" * 64


def test_many_unknown_fields_are_counted() -> None:
    assert ignored({**PROMPT, **{f"f{number}": 1 for number in range(5000)}}) == ("5000 fields",)


def test_the_header_is_bounded() -> None:
    names = [f"{'x' * 60}{number:02}" for number in range(40)]
    value = header_value(names)
    assert value.startswith(f"{names[0]}, {names[1]}, ")
    assert value.endswith(", and 32 more")
    assert len(value) < 600


def test_each_name_is_logged_once_for_a_route_with_the_field_that_is_similar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = IgnoredFieldLog()
    for _ in range(2):
        log.note("/v1/completions", ("temprature", "quite_another"), CompletionBody.model_fields)
    assert caplog.messages == [
        "/v1/completions: the field temprature of a request's body has no effect; did the client "
        "mean temperature?",
        "/v1/completions: the field quite_another of a request's body has no effect",
    ]


def test_the_log_of_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredFieldLog()
    for number in range(1000):
        log.note("/", (f"f{number}",), ())
    assert len(caplog.messages) == 257
    assert caplog.messages[-1] == "further fields without effect are not logged"
