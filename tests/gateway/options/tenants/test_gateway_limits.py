"""Limits of tenants at the gateway: refusals, answers' headers, and return of unused quota."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.keys.api_keys import TenantRecord
from services.gateway.options.tenants import Tenants
from services.gateway.options.tenants.limits.redis_limits import TAKE_SECONDS, RedisLimits
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import BODY, RedisKeyring, bearer, limited, post
from tests.gateway.raw_http import post_head
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.redis_servers import needs_redis, redis_server
from tests.slowness import busy_slowness


def generate(served: Serving, key: str, **fields: Any) -> Any:
    request = gateway_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 2}, **fields
    )
    return served.stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))


async def to_end(call: Any) -> None:
    async for _ in call:
        pass


async def test_requests_beyond_a_minutes_worth_are_refused_and_told_when(
    model: Path, tmp_path: Path
) -> None:
    async with limited(model, tmp_path, requests_per_minute=2) as (served, key):
        first, second, third = [await post(served, key) for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert 29 < float(first.headers["x-ratelimit-reset-requests"].rstrip("s")) <= 30
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert third.headers["x-ratelimit-reset-requests"].endswith("s")
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert error["message"] == "tenant acme has reached its limit of 2 requests per minute"
        assert 29_000 < int(third.headers["retry-after-ms"]) <= 30_000 * 1.25
        assert 30 <= int(third.headers["retry-after"]) <= 38
        assert served.scheduler.adds[2:] == []


async def test_a_request_counts_if_it_ran_until_its_own_time_limit(
    model: Path, tmp_path: Path
) -> None:
    scheduler = FakeScheduler(permits=1)
    async with limited(model, tmp_path, scheduler, requests_per_minute=1) as (served, key):
        headers = bearer(key) | {"X-Request-Timeout": "0.5"}
        answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 504
        assert (await post(served, key)).status_code == 429


async def test_the_limit_is_checked_before_the_body_is_read(model: Path, tmp_path: Path) -> None:
    """Before the limit, the gateway checks the key and the announced size of the body."""
    async with limited(model, tmp_path, requests_per_minute=1) as (served, key):
        assert (await post(served, key)).is_success
        host, port = served.base_url.removeprefix("http://").split(":")
        for num_bytes, shown, status in (
            (100, key, b"429"),
            (100, "wrong", b"401"),
            (10**9, key, b"413"),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = post_head("/v1/completions", num_bytes, f"Authorization: Bearer {shown}")
            writer.write(head)
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert (await reader.readuntil(b"\r\n")).split()[1] == status
            writer.close()


async def test_requests_at_once_are_refused_until_one_is_over(model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with limited(model, tmp_path, scheduler, max_concurrent_requests=2) as (served, key):
        over_http = asyncio.create_task(post(served, key))
        call = generate(served, key)
        await until(lambda: scheduler.num_running == 2)
        refused = await post(served, key)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "concurrent_requests"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_end(generate(served, key))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await until(lambda: scheduler.num_running == 1)
        second = asyncio.create_task(post(served, key))
        await until(lambda: scheduler.num_running == 2)
        scheduler.run_freely()
        assert (await over_http).is_success
        assert (await second).is_success
        # However a request ends, its slot is released.
        for fields in ({"max_tokens": 0}, {"prompt": []}, {"suffix": "x"}, {"model": "other"}):
            for _ in range(3):
                assert (await post(served, key, **fields)).status_code in (400, 404)
        scheduler.permits = 0
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                await served.http.post(
                    "/v1/completions", json=BODY, headers=bearer(key), timeout=0.2
                )
        scheduler.run_freely()
        await until(lambda: scheduler.num_running == 0)
        assert (await post(served, key)).is_success


async def test_tokens_are_reserved_and_what_was_not_used_comes_back(
    model: Path, tmp_path: Path
) -> None:
    """The request reserves 3 prompt tokens and 40 output tokens. In the end, 2 prompt tokens were
    cached, and the answer has 2 tokens.
    """
    scheduler = FakeScheduler(permits=0, num_cached_tokens=2, answer=[9, 0])
    async with limited(model, tmp_path, scheduler, tokens_per_minute=60) as (served, key):
        first = asyncio.create_task(post(served, key, max_tokens=40))
        await until(lambda: scheduler.num_running == 1)
        refused = await post(served, key, max_tokens=40)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert "of which this request may take 43" in error["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "17"
        scheduler.run_freely()
        assert (await first).headers["x-ratelimit-remaining-tokens"] == "17"
        # Three tokens were used: one prompt token that was not cached, and two output tokens.
        second = await post(served, key, max_tokens=40)
        assert second.is_success
        assert 14 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 15
        # A chat request without a maximum length reserves the rest of the quota.
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = await served.http.post("/v1/chat/completions", json=chat, headers=bearer(key))
        assert answer.status_code in (200, 429)


async def test_a_request_that_can_never_fit_is_told_not_to_come_back(
    model: Path, tmp_path: Path
) -> None:
    async with limited(model, tmp_path, tokens_per_minute=20) as (served, key):
        refused = await post(served, key, max_tokens=18)
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert "may take 21 tokens, more than the 20" in refused.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_end(generate(served, key, n=9))
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
        assert (await post(served, key, max_tokens=17)).is_success


async def test_what_the_load_refuses_costs_the_tenant_nothing(model: Path, tmp_path: Path) -> None:
    async with limited(
        model, tmp_path, requests_per_minute=3, tokens_per_minute=100, max_concurrent_requests=1
    ) as (served, key):
        scheduler = served.scheduler
        scheduler.rejection = scheduler_pb2.Rejection(code=8, reason="QUEUE_FULL", message="full")
        for _ in range(5):
            assert (await post(served, key)).status_code == 503
            with pytest.raises(grpc.aio.AioRpcError):
                await to_end(generate(served, key))
        scheduler.rejection = None
        scheduler.set_queue(num_waiting=3, max_num_waiting=3)
        (replica,) = served.gateway.membership.replicas
        await until(lambda: replica.queue_refusal(None) is not None)
        for _ in range(5):
            assert (await post(served, key)).status_code == 503
            with pytest.raises(grpc.aio.AioRpcError):
                await to_end(generate(served, key))
        scheduler.set_queue(num_waiting=0, max_num_waiting=3)
        await until(lambda: replica.queue_refusal(None) is None)
        answer = await post(served, key)
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "95"


async def test_openais_client_comes_back_after_the_hint_and_not_where_it_is_told_so(
    model: Path, tmp_path: Path
) -> None:
    """The limit is 20 requests a minute. After a burst of 20, it allows one request every 3 s."""
    async with limited(model, tmp_path, requests_per_minute=20, tokens_per_minute=300) as (
        served,
        key,
    ):
        await asyncio.gather(*(post(served, key) for _ in range(20)))
        assert (await post(served, key)).status_code == 429
        async with served.openai(api_key=key, max_retries=2) as client:
            began = time.monotonic()
            raw = await client.completions.with_raw_response.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=2
            )
            assert raw.retries_taken == 1
            assert time.monotonic() - began > 1, "it waited for about as long as it was told"
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="tiny", prompt=[5], max_tokens=400)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert caught.value.type == "tokens"
        refusals = await served.metrics()
        label = 'model_name="tiny",reason="rate_limit_exceeded",tenant="acme"'
        assert f"stepwell_tenant_refusals_total{{{label}}} 1.0" in refusals


async def test_a_grpc_client_finds_when_to_come_back_in_details_and_metadata(
    model: Path, tmp_path: Path
) -> None:
    async with limited(model, tmp_path, requests_per_minute=1) as (served, key):
        call = generate(served, key)
        await to_end(call)
        left = dict(await call.trailing_metadata())
        assert left["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_end(generate(served, key))
        error = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        pushback = int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])
        assert 59_000 < pushback <= 75_000
        rich = rpc_status.from_call(error)
        quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
        found = [any(detail.Unpack(kind) for detail in rich.details) for kind in (quota, retry)]
        assert found == [True, True]
        assert quota.violations[0].subject == "tenant:acme"
        assert abs(retry.retry_delay.ToTimedelta().total_seconds() - pushback / 1000) < 0.01


async def test_tenants_without_limits_and_plain_keys_have_no_headers(
    model: Path, tmp_path: Path
) -> None:
    async with limited(model, tmp_path) as (served, key):
        answer = await post(served, key)
        assert answer.is_success
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_usage_and_refusals_are_counted_by_tenant(model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(num_cached_tokens=1)
    async with limited(model, tmp_path, scheduler, max_concurrent_requests=9) as (served, key):
        await post(served, key)
        await to_end(generate(served, key))
        await post(served, key, prompt=[10**6])
        await post(served, "wrong")
        metrics = await served.metrics()
        expected = {
            'stepwell_tenant_requests_total{model_name="tiny",tenant="acme"}': 2,
            'stepwell_tenant_tokens_total{kind="prompt",model_name="tiny",tenant="acme"}': 6,
            'stepwell_tenant_tokens_total{kind="cached",model_name="tiny",tenant="acme"}': 2,
            'stepwell_tenant_tokens_total{kind="generated",model_name="tiny",tenant="acme"}': 4,
            'stepwell_tenant_refusals_total{model_name="tiny",reason="invalid_argument",'
            'tenant="acme"}': 1,
            'stepwell_tenant_refusals_total{model_name="tiny",reason="rate_limit_exceeded",'
            'tenant="acme"}': 0,
            'stepwell_tenant_refusals_total{model_name="tiny",reason="tenant_queue_full",'
            'tenant="acme"}': 0,
            'vllm:admission_rejections_total{model_name="tiny",reason="invalid_api_key"}': 1,
        }
        for name, count in expected.items():
            assert f"{name} {count:.1f}\n" in metrics


async def test_series_of_tenants_are_for_the_address_of_metrics(
    model: Path, tmp_path: Path
) -> None:
    """Clients can read the metrics at their address without a key, so no tenant is in these."""
    series = 'stepwell_tenant_requests_total{model_name="tiny",tenant="acme"} 1.0'
    async with limited(model, tmp_path) as (served, key):
        await post(served, key)
        text = (await served.http.get("/metrics")).text
        assert 'stepwell_gateway_replicas{model_name="tiny"} 1.0' in text
        assert "acme" not in text
    apart = {"api_key_file": tmp_path / "keys.json", "metrics_address": "127.0.0.1:0"}
    async with serving(model, **apart) as served:
        await post(served, key)
        assert (await served.http.get("/metrics")).status_code == 404
        url = f"http://{served.metrics_address}/metrics"
        async with httpx.AsyncClient() as scraper:
            assert series in (await scraper.get(url)).text


@needs_redis
async def test_two_gateways_share_limits_through_redis_and_part_them_without_it(
    model: Path, tmp_path: Path
) -> None:
    """No request fails or waits while Redis is stopped, killed or empty."""
    async with AsyncExitStack() as entered:
        server = entered.enter_context(redis_server(tmp_path / "redis"))
        ring = RedisKeyring(server.url)
        entered.push_async_callback(ring.redis.close)
        key = await ring.add(TenantRecord("acme", requests_per_minute=10))
        free = await ring.add(
            TenantRecord(
                "free",
                requests_per_minute=10**6,
                tokens_per_minute=10**8,
                max_concurrent_requests=1000,
            )
        )
        settings = {"api_keys_in_redis": True, "redis_url": server.url}
        one, two = [
            await entered.enter_async_context(serving(model, FakeScheduler(), **settings))
            for _ in range(2)
        ]
        stores = [limit_store(served) for served in (one, two)]
        await until(lambda: all(store.num_gateways == 2 for store in stores))
        for store in stores:  # a long time limit, for busy machines
            store._take_seconds = DEADLINE_SECONDS
        statuses = [
            (await post(served, key)).status_code for _ in range(6) for served in (one, two)
        ]
        assert statuses == 10 * [200] + 2 * [429]
        for store in stores:
            store._take_seconds = TAKE_SECONDS
        usual = await _slowest(one, free)
        assert (await post(two, free)).is_success
        for change in (server.stop, server.go_on, server.kill, server.start):
            change()
            slowest = max(await _slowest(one, free), await _slowest(two, free))
            assert slowest < usual + busy_slowness(), change
        await until(lambda: not stores[0].is_lost)


def limit_store(served: Serving) -> RedisLimits:
    [option] = [one for one in served.gateway.parts.options if isinstance(one, Tenants)]
    assert isinstance(option.limit_store, RedisLimits)
    return option.limit_store


async def _slowest(served: Serving, key: str) -> float:
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert (await post(served, key)).is_success
        slowest = max(slowest, time.monotonic() - began)
    return slowest
