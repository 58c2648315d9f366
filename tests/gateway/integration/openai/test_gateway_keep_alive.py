"""In each API, a stream gets keep-alive messages while it waits, before and between tokens."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.fake_scheduler import FULL, FakeScheduler
from tests.gateway.serving import Serving, serving

HI = [{"role": "user", "content": "hi"}]
APIS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": "hi", "max_tokens": 3, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3}),
]
EACH = pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.fixture
async def waiting(model: Any) -> AsyncIterator[Serving]:
    async with serving(
        model, FakeScheduler(permits=0), sse_keep_alive_interval=0.02, resubmit_timeout_seconds=0.3
    ) as served:
        yield served


def without_signs(text: str, sign: str) -> list[Any]:
    """The field names of each event in a stream, without the keep-alive messages `sign`."""
    lines = [line for line in text.replace(sign, "").splitlines() if line.startswith("data: {")]
    return [sorted(json.loads(line[6:])) for line in lines]


@EACH
async def test_a_stream_says_that_it_lives_while_it_waits(
    waiting: Serving, path: str, body: dict[str, Any]
) -> None:
    sign = PING if path == "/v1/messages" else COMMENT
    seen, steps = "", 0
    async with waiting.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for text in answer.aiter_text():
            seen += text
            if seen.count(sign) > 2 * steps and steps < 3:
                if steps == 0:
                    assert not seen.replace(sign, "")
                steps += 1
                waiting.scheduler.allow(1)
    assert steps == 3
    waiting.scheduler.run_freely()
    plain = (await waiting.http.post(path, json={**body, "stream": True})).text
    assert without_signs(seen, sign) == without_signs(plain, sign)
    assert without_signs(seen, sign)


async def test_packages_pass_over_signs_of_life(waiting: Serving) -> None:
    async with waiting.openai() as client, waiting.anthropic() as other:
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=2, stream=True
        )
        waiting.scheduler.run_freely()
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
        waiting.scheduler.permits = 0
        async with other.messages.stream(model="tiny", messages=HI, max_tokens=2) as events:
            waiting.scheduler.run_freely()
            assert (await events.get_final_message()).stop_reason == "max_tokens"


@EACH
async def test_an_error_after_a_sign_of_life_is_an_event(
    waiting: Serving, path: str, body: dict[str, Any]
) -> None:
    ask = {**body, "stream": True}
    late = {"X-Request-Timeout": "1.5"}
    answer = await waiting.http.post(path, json=ask, headers=late)
    assert answer.status_code == 200
    assert "X-Request-Timeout" in answer.text.rpartition("data: {")[2]


async def test_a_refusal_before_a_sign_of_life_has_its_status(model: Any) -> None:
    fake = FakeScheduler(permits=0, rejection=FULL)
    async with serving(model, fake, sse_keep_alive_interval=60.0) as served:
        for path, body in APIS:
            answer = await served.http.post(path, json={**body, "stream": True})
            assert answer.status_code >= 429


async def test_a_stream_may_be_silent_where_that_is_set(model: Any) -> None:
    async with serving(model, FakeScheduler(permits=0), sse_keep_alive_interval=0.0) as served:
        path, body = APIS[1]
        ask, late = {**body, "stream": True}, {"X-Request-Timeout": "0.2"}
        assert (await served.http.post(path, json=ask, headers=late)).status_code == 504


@EACH
@pytest.mark.parametrize("max_model_len", [256, 2], ids=["answers", "refuses"])
async def test_a_stream_lives_while_it_waits_for_a_first_replica(
    model: Any, path: str, body: dict[str, Any], max_model_len: int
) -> None:
    """The replica answers, or is too small for the prompt."""
    sign = PING if path == "/v1/messages" else COMMENT
    first, seen = FakeScheduler(max_model_len=max_model_len, max_request_tokens=max_model_len), ""
    nowhere = {"schedulers": ("127.0.0.1:1",), "num_ready": 0}
    async with serving(model, first, sse_keep_alive_interval=0.02, **nowhere) as served:
        body = {**body, "stream": True}
        async with served.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                if seen.count(sign) < 3 <= (seen + text).count(sign):
                    assert not (seen + text).replace(sign, "")
                    served.gateway.fleet.set_addresses("test", [first.address])
                seen += text
        again = (await served.http.post(path, json=body)).text
    assert seen.count(sign) >= 3
    if max_model_len > 2:
        assert without_signs(seen, sign) == without_signs(again, sign) != []
    else:
        last = [line for line in seen.splitlines() if line.startswith("data: {")][-1]
        assert json.loads(again)["error"]["message"] in last
