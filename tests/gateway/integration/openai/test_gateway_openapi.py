"""The OpenAPI document describes every kind of answer: its status and its schema."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FULL, FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.plain_http import async_http_client
from tools.reference_pages import BODIES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANTHROPIC, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"stream": True, "return_token_ids": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"prompt_logprobs": 2},
    {"stop": "e"},
    {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 2}},
)
OF_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"logprobs": 0, "stream": True},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0},
    {"prompt": ["a", [5, 6]][:1], "best_of": 2},
)
OF_CHAT: tuple[dict[str, Any], ...] = (
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "stream": True},
)
TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}
OF_MESSAGES: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"stop_sequences": ["e"], "stream": True},
    {
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stream": True,
    },
    {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}},
)
OF_RESPONSES: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "stream": True},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "instructions": "a"},
    {"text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}},
)


async def documented(served: Serving) -> Documented:
    return Documented((await served.http.get("/openapi.json")).json())


async def test_every_generated_answer_is_as_documented(served: Serving) -> None:
    document = await documented(served)
    for path, base, special in (
        (COMPLETIONS, {"prompt": "the"}, OF_COMPLETIONS),
        (CHAT, {"messages": MESSAGES}, OF_CHAT),
    ):
        for more in (*ASKED, *special):
            body = {"max_tokens": 8, "seed": 1, **base, **more}
            response = await served.http.post(path, json=body)
            assert response.status_code == 200, (more, response.text)
            document.check(path, response)
    for more in OF_MESSAGES:
        body = {"max_tokens": 8, "messages": MESSAGES, "seed": 1, **more}
        response = await served.http.post(ANTHROPIC, json=body)
        assert response.status_code == 200, (more, response.text)
        document.check(ANTHROPIC, response)
    for more in OF_RESPONSES:
        body = {"max_output_tokens": 8, "input": "hi", "seed": 1, **more}
        response = await served.http.post(RESPONSES, json=body)
        assert response.status_code == 200, (more, response.text)
        document.check(RESPONSES, response)


async def test_every_other_answer_is_as_documented(served: Serving) -> None:
    document = await documented(served)
    assert len(document.document["paths"]) == 35
    named_bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for operations in document.document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    }
    bases = {base.__name__ for body in BODIES.values() for base in body.__mro__}
    assert {body.__name__ for body in BODIES.values()} <= named_bodies <= bases, "docs/fields.md"
    opened = await served.http.post("/v1/sessions", json={})
    document.check("/v1/sessions", opened)
    session = opened.json()["id"]
    for path, operations in document.document["paths"].items():
        for method in {"get", "head"} & operations.keys():
            named = path.replace("{name}", "tiny").replace("{session_id}", session)
            response = await served.http.request(method, named)
            assert response.status_code == (404 if path == "/traces/{name}" else 200), path
            document.check(path, response)
    ended = await served.http.delete(f"/v1/sessions/{session}")
    document.check("/v1/sessions/{session_id}", ended)
    for path, body in (
        ("/tokenize", {"prompt": "the", "return_token_strs": True}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [5, 6]}),
        (COUNT, {"messages": MESSAGES}),
        ("/ping", None),
    ):
        response = await served.http.post(path, json=body)
        assert response.status_code == 200, path
        document.check(path, response)


async def test_errors_are_as_documented(served: Serving) -> None:
    document = await documented(served)
    too_large = b'{"prompt": "' + b"x" * 5_000_000 + b'"}'
    asked: tuple[tuple[int, str, str, dict[str, Any]], ...] = (
        (400, "POST", COMPLETIONS, {"json": {"prompt": "a", "top_p": 2}}),
        (400, "POST", CHAT, {"content": b"{", "headers": JSON}),
        (400, "POST", ANTHROPIC, {"content": b"{", "headers": JSON}),
        (404, "POST", COUNT, {"json": {"messages": MESSAGES, "model": "another"}}),
        (415, "POST", COUNT, {"content": b"{}"}),
        (
            400,
            "POST",
            COMPLETIONS,
            {"json": {"prompt": "a"}, "headers": {"X-Request-Timeout": "x"}},
        ),
        (404, "POST", CHAT, {"json": {"messages": MESSAGES, "model": "another"}}),
        (404, "POST", "/tokenize", {"json": {"prompt": "a", "model": "another"}}),
        (404, "POST", "/detokenize", {"json": {"tokens": [5], "model": "another"}}),
        (404, "GET", "/v1/models/{name}", {}),
        (404, "DELETE", "/v1/sessions/{session_id}", {}),
        (404, "POST", COMPLETIONS, {"json": {"prompt": "a", "session": "none"}}),
        (413, "POST", "/detokenize", {"content": too_large, "headers": JSON}),
        (415, "POST", COMPLETIONS, {"content": b"{}"}),
        (415, "POST", CHAT, {"content": b"{}", "headers": {**JSON, "Content-Encoding": "gzip"}}),
        (421, "GET", "/status", {"headers": {"Host": "example.com"}}),
        (431, "GET", "/health", {"headers": {f"X-{n}": "a" for n in range(200)}}),
        (
            504,
            "POST",
            CHAT,
            {"json": {"messages": MESSAGES}, "headers": {"X-Request-Timeout": "1e-9"}},
        ),
    )
    for status, method, path, request in asked:
        response = await served.http.request(method, path, **request)
        assert response.status_code == status, (path, response.text)
        document.check(path, response)


async def test_answers_of_a_server_that_is_full_are_as_documented(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake, max_concurrent_requests=1) as served:
        document = await documented(served)
        body = {"prompt": "the", "max_tokens": 2}
        first = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
        await until(lambda: fake.num_running == 1)
        for path in (COMPLETIONS, ANTHROPIC, "/tokenize", COUNT):
            response = await served.http.post(path, json=body)
            assert response.status_code == 503
            document.check(path, response)
        fake.run_freely()
        assert (await first).status_code == 200
        fake.rejection = FULL
        response = await served.http.post(COMPLETIONS, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        document.check(COMPLETIONS, response)


async def test_answers_without_a_replica_are_as_documented(model: Path) -> None:
    fake = FakeScheduler()
    settings = {"resubmit_timeout_seconds": 0.1}
    async with serving(model, fake, **settings) as served:
        document = await documented(served)
        fake.set_state(ready=False, reason="no worker")
        await until(lambda: served.gateway.membership.num_ready == 0)
        for path in (COMPLETIONS, "/health", "/ping"):
            post = path == COMPLETIONS
            body = {"prompt": "a"} if post else None
            response = await served.http.request("POST" if post else "GET", path, json=body)
            assert response.status_code == 503, response.text
            document.check(path, response)
        response = await served.http.head("/health")
        assert response.status_code == 503
        document.check("/health", response)


async def test_an_error_in_a_stream_is_as_documented(served: Serving) -> None:
    document = await documented(served)
    served.scheduler.permits = 2
    body = {"prompt": "the", "max_tokens": 50, "stream": True}
    asked = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await until(lambda: served.scheduler.permits == 0)
    served.scheduler.engine_error = "nothing but NaN"
    served.scheduler.run_freely()
    response = await asked
    assert (response.status_code, '"error"' in response.text) == (200, True)
    document.check(COMPLETIONS, response)
    body |= {"stream": False, "messages": MESSAGES}
    del body["prompt"]
    for path in (CHAT, ANTHROPIC):
        whole = await served.http.post(path, json=body)
        assert whole.status_code == 500
        document.check(path, whole)


async def test_another_method_is_refused_with_those_that_there_are(served: Serving) -> None:
    document = (await documented(served)).document
    for path, operations in document["paths"].items():
        allowed = {method.upper() for method in operations}
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
            response = await served.http.request(method, path)
            assert (response.status_code == 405) == (method not in allowed), (method, path)
            if response.status_code == 405:
                assert set(response.headers["allow"].split(", ")) == allowed
                assert response.json()["error"]["type"] == "invalid_request_error"


async def test_bodies_say_what_is_accepted_without_effect(served: Serving) -> None:
    schemas = (await documented(served)).document["components"]["schemas"]
    chat = schemas["ChatCompletionBody"]
    assert chat["properties"]["store"]["enum"] == [None, False]
    assert chat["properties"]["temperature"]["minimum"] == 0
    assert "additionalProperties" not in chat
    assert chat["required"] == ["messages"]
    assert schemas["CompletionBody"]["properties"]["n"]["minimum"] == 1


async def test_operators_calls_have_a_document_of_their_own(model: Path) -> None:
    one, other = FakeScheduler(blocks_in_use=True), FakeScheduler()
    settings: dict[str, Any] = {"admin_address": "127.0.0.1:0"}
    async with serving(model, one, other, **settings) as served:
        assert not {"/pause", "/drain"} & (await documented(served)).document["paths"].keys()
        async with async_http_client(base_url=f"http://{served.admin_address}") as admin:
            document = Documented((await admin.get("/openapi.json")).json())
            page = {"headers": {"Origin": "https://example.com"}}
            asked: tuple[tuple[int, str, str, dict[str, Any]], ...] = (
                (200, "POST", "/pause", {"params": {"mode": "keep"}}),
                (400, "POST", "/pause", {"params": {"mode": "stop"}}),
                (403, "POST", "/resume", page),
                (200, "POST", "/resume", {}),
                (200, "GET", "/is_paused", {}),
                (200, "HEAD", "/is_paused", {}),
                (409, "POST", "/reset_prefix_cache", {}),
                (400, "POST", "/drain", {}),
                (404, "POST", "/drain", {"params": {"replica": "nowhere"}}),
                (200, "POST", "/drain", {"params": {"replica": one.address}}),
                (200, "POST", "/undrain", {"params": {"replica": one.address}}),
                (200, "GET", "/server_info", {}),
            )
            for status, method, path, request in asked:
                response = await admin.request(method, path, **request)
                assert response.status_code == status, (path, response.text)
                document.check(path, response)
            parameters = document.document["paths"]["/pause"]["post"]["parameters"]
            assert [each["name"] for each in parameters] == [
                *("replica", "mode", "wait_for_inflight_requests", "clear_cache"),
                "timeout_seconds",
            ]


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_a_page_shows_the_document(served: Serving, path: str) -> None:
    first, second = [await served.http.get(path) for _ in range(2)]
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert "/openapi.json" in first.text
    assert second.text == first.text
