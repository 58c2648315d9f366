"""The fields by which clients of Anthropic and OpenAI ask that a prompt stays cached."""

import json
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.common.request.program import DeclaredProgram
from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.exchange.asking_body import StreamedBody
from services.gateway.adapters.http.exchange.parse import parse_body
from services.gateway.adapters.http.exchange.program_fields import program_of
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody

HOUR = {"type": "ephemeral", "ttl": "1h"}
SHORT = {"type": "ephemeral"}
TEXT = {"type": "text", "text": "hi"}


def messages(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [*content, TEXT]}], **fields}


def chat(part: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [TEXT | part]}], **fields}


def read(kind: type[StreamedBody], body: dict[str, Any]) -> StreamedBody:
    return parse_body(json.dumps(body).encode(), kind)[0]


RESULT = {"type": "tool_result", "tool_use_id": "c"}
TOOL = {"name": "f", "input_schema": {"properties": {"cache_control": {"ttl": 1}}}}


@pytest.mark.parametrize(
    ("kind", "body", "seconds"),
    [
        (MessagesBody, messages(), 0),
        (MessagesBody, messages(cache_control=None, tools=[TOOL]), 0),
        (MessagesBody, messages(cache_control=SHORT), 300),
        (MessagesBody, messages(TEXT | {"cache_control": HOUR}), 3600),
        (MessagesBody, messages(RESULT | {"cache_control": HOUR}), 3600),
        (MessagesBody, messages(RESULT | {"content": [TEXT | {"cache_control": HOUR}]}), 3600),
        (MessagesBody, messages(system=[TEXT | {"cache_control": HOUR}]), 3600),
        (MessagesBody, messages(tools=[TOOL | {"cache_control": HOUR}]), 3600),
        (MessagesBody, messages(TEXT | {"cache_control": HOUR}, cache_control=SHORT), 3600),
        (MessagesBody, messages(TEXT | {"cache_control": HOUR}, unknown=1), 3600),
        (ChatCompletionBody, chat({}), 0),
        (ChatCompletionBody, chat({"cache_control": SHORT}), 300),
        (ChatCompletionBody, chat({"prompt_cache_breakpoint": {"mode": "explicit"}}), 1800),
        (ChatCompletionBody, chat({"prompt_cache_breakpoint": {"ttl": "90s"}}), 90),
        (
            ChatCompletionBody,
            chat({"prompt_cache_breakpoint": {}}, prompt_cache_options={"ttl": "5m"}),
            300,
        ),
        (ChatCompletionBody, chat({}, prompt_cache_options={"mode": "explicit"}), 0),
        (ChatCompletionBody, chat({}, prompt_cache_options={"ttl": "12h"}), 43_200),
        (ChatCompletionBody, chat({}, prompt_cache_retention="in_memory"), 0),
        (ChatCompletionBody, chat({}, prompt_cache_retention="24h"), 86_400),
        (ResponsesBody, {"input": "hi", "prompt_cache_options": {"ttl": "1d"}}, 86_400),
        (ResponsesBody, {"input": "hi", "prompt_cache_retention": "24h"}, 86_400),
        (
            ResponsesBody,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_text",
                                "text": "hi",
                                "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"},
                            }
                        ],
                    }
                ]
            },
            1800,
        ),
    ],
)
def test_the_longest_time_counts(
    kind: type[StreamedBody], body: dict[str, Any], seconds: int
) -> None:
    expected = DeclaredProgram("", keep_seconds=seconds) if seconds else None
    assert program_of(read(kind, body), {}) == expected


@pytest.mark.parametrize("ttl", ["", "1", "0m", "-5m", "5 m", "1w", "1h30m", 300, True, "99999d"])
def test_a_time_that_is_none_is_refused_by_name(ttl: Any) -> None:
    for kind, body, field in (
        (MessagesBody, messages(cache_control={"ttl": ttl}), "cache_control.ttl"),
        (
            MessagesBody,
            messages(TEXT | {"cache_control": {"ttl": ttl}}),
            "messages[0].content[0].cache_control.ttl",
        ),
        (
            ChatCompletionBody,
            chat({"prompt_cache_breakpoint": {"ttl": ttl}}),
            "messages[0].content[0].prompt_cache_breakpoint.ttl",
        ),
        (
            ChatCompletionBody,
            chat({}, prompt_cache_options={"ttl": ttl}),
            "prompt_cache_options.ttl",
        ),
    ):
        with pytest.raises(InvalidArgument) as error:
            read(kind, body)
        assert error.value.field == field


def test_other_retentions_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as error:
        read(ChatCompletionBody, chat({}, prompt_cache_retention="a week"))
    assert error.value.field == "prompt_cache_retention"
