"""Idempotency keys together with client sessions (input in turns), traces, and tenants' limits."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest

from services.common.keys.api_keys import TenantRecord
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import BODY, FileKeyring, bearer, limited, post
from tests.gateway.options.sessions.test_gateway_sessions import error_of, open_session
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.spans import Tracer, assert_adds_up


async def test_an_idempotency_key_does_not_go_with_a_session(served: Serving) -> None:
    session = await open_session(served)
    answer = await served.http.post(
        "/v1/completions",
        json={"prompt": "hello", "session": session},
        headers={"idempotency-key": "k"},
    )
    assert (await error_of(answer))[::2] == (400, "session")


async def test_a_session_call_has_no_key(served: Serving) -> None:
    call = served.stub.GenerateSession(metadata=(("idempotency-key", "k"),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Idempotency-Key cannot be given with a session" in caught.value.details()


async def test_keyed_requests_have_the_spans_of_the_one_that_made_the_answer(model: Path) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(), tracing=tracer.tracing) as served:
        headers = {"Idempotency-Key": "k"}
        for _ in range(2):
            await served.http.post(
                "/v1/completions", json={"prompt": "a", "seed": 1}, headers=headers
            )
        first, replay = await tracer.trace(0), await tracer.trace(1)
        assert_adds_up(first)
        assert_adds_up(replay)
        assert len(first.named("gateway.engine")) == 1
        assert replay.named("gateway.engine") == []
        assert replay.root.attributes["stepwell.is_replay"] is True
        waits = [span.attributes["stepwell.wait_reason"] for span in replay.named("gateway.wait")]
        assert waits == ["idempotency_key"]


@pytest.mark.parametrize("permits", [0, 1], ids=["before", "after its first token"])
async def test_an_answer_with_a_key_gives_back_what_it_did_not_use_when_it_ends_without_its_client(
    model: Path, tmp_path: Path, permits: int
) -> None:
    """The tenant is charged for a prompt of 3 tokens and an answer of up to 40. In the end, 2
    prompt tokens were cached and the answer has 2 tokens.
    """
    scheduler = FakeScheduler(permits=permits, num_cached_tokens=2, answer=[9, 0])
    async with limited(model, tmp_path, scheduler, tokens_per_minute=60) as (served, key):
        body, headers = BODY | {"max_tokens": 40}, bearer(key) | {"Idempotency-Key": "once"}
        with pytest.raises(httpx.ReadTimeout):
            await served.http.post("/v1/completions", json=body, headers=headers, timeout=0.5)
        await until(lambda: not served.gateway.gate.inside)
        assert scheduler.num_running == 1
        assert (await post(served, key, max_tokens=40)).status_code == 429
        scheduler.run_freely()
        async with asyncio.timeout(DEADLINE_SECONDS):  # the end is reported with a delay
            while not (other := await post(served, key, max_tokens=40)).is_success:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert 14 <= int(other.headers["x-ratelimit-remaining-tokens"]) <= 16


async def test_a_request_that_continues_a_stopped_answer_is_charged_for_what_it_adds(
    model: Path, tmp_path: Path
) -> None:
    """The prompt has 3 tokens. The first client leaves after 2 of 20 tokens."""
    scheduler, ring = FakeScheduler(permits=2), FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", tokens_per_minute=60))
    linger = {"idempotency_linger_seconds": 0.0}
    async with serving(model, scheduler, api_key_file=ring.path, **linger) as served:
        body = BODY | {"max_tokens": 20, "ignore_eos": True}
        headers = bearer(key) | {"Idempotency-Key": "once"}
        with pytest.raises(httpx.ReadTimeout):
            await served.http.post("/v1/completions", json=body, headers=headers, timeout=0.5)
        await until(lambda: not scheduler.num_running)
        scheduler.run_freely()
        answer = await served.http.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 20
        other = await post(served, key, max_tokens=1)
        left = 60 - (3 + 2) - (3 + 18) - (3 + 1)
        assert left <= int(other.headers["x-ratelimit-remaining-tokens"]) <= left + 10
        labels = 'kind="generated",model_name="tiny",tenant="acme"'
        assert f"stepwell_tenant_tokens_total{{{labels}}} 21.0" in await served.metrics()
