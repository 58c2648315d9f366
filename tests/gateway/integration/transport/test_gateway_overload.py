"""The gateway refuses requests that the replicas cannot serve, or not before their deadline."""

import asyncio
import json
import re
from pathlib import Path

import grpc
import pytest
from stepwell.gateway.v1 import gateway_pb2

from services.gateway.adapters.grpc.inference_servicer import GENERATE
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_http import post_head
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.streams import Stream, expected


async def full_for(served: Serving, timeout_seconds: float | None) -> None:
    (replica,) = served.gateway.membership.replicas
    await until(lambda: replica.queue_refusal(timeout_seconds) is not None)


async def test_a_full_system_refuses_before_it_reads_and_without_asking_the_scheduler(
    model: Path,
) -> None:
    """The client gets the refusal before it has sent the HTTP body or the gRPC message."""
    async with serving(model, FakeScheduler()) as served:
        served.scheduler.set_queue(num_waiting=3, max_num_waiting=3)
        await full_for(served, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.http.base_url.port)
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = b"{}"
            writer.write(post_head(path, len(body)))
            async with asyncio.timeout(DEADLINE_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith("HTTP/1.1 503 ")
                assert re.search(r"retry-after-ms: 1[012]\d\d\r\n", head.lower())
                size = int(re.findall("content-length: ([0-9]+)", head.lower())[0])
                error = json.loads(await reader.readexactly(size))["error"]
            assert error["code"] == "queue_full"
            writer.write(body)  # the connection can be used again after the body
        writer.close()
        call = served.channel.stream_stream(GENERATE)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert served.scheduler.adds == []
        refused = await served.http.get("/metrics")
        assert 'rejections_total{model_name="tiny",reason="queue_full"} 3.0' in refused.text
        served.scheduler.set_queue(num_waiting=0, max_num_waiting=3)
        (replica,) = served.gateway.membership.replicas
        await until(lambda: replica.queue_refusal(None) is None)
        assert (await served.http.post("/v1/completions", json={"prompt": "the"})).is_success


async def test_what_the_framework_refuses_is_refused_alike_by_a_full_system(model: Path) -> None:
    async with serving(model, FakeScheduler()) as served:
        served.scheduler.set_queue(num_waiting=3, max_num_waiting=3)
        await full_for(served, None)
        for headers, status in (({"X-Request-Timeout": "soon"}, 400), ({}, 503)):
            answer = await served.http.post(
                "/v1/completions", json={"prompt": "a"}, headers=headers
            )
            assert answer.status_code == status, headers


async def test_a_queue_is_too_long_for_those_alone_who_cannot_wait_for_it(model: Path) -> None:
    async with serving(model, FakeScheduler()) as served:
        served.scheduler.set_queue(
            num_waiting=4, max_num_waiting=100, seconds_per_request=0.5, service_seconds=1.0
        )
        await full_for(served, 2.9)
        body, hasty = {"prompt": "the"}, {"X-Request-Timeout": "2.9"}
        refused = await served.http.post("/v1/completions", json=body, headers=hasty)
        assert refused.status_code == 503
        assert 1000 <= int(refused.headers["retry-after-ms"]) <= 1251
        assert refused.json()["error"]["code"] == "queue_too_long"
        assert served.scheduler.adds == []
        patient = {"X-Request-Timeout": "4"}
        assert (await served.http.post("/v1/completions", json=body, headers=patient)).is_success
        assert (await served.http.post("/v1/completions", json=body)).is_success


async def test_requests_on_their_way_to_the_scheduler_count_as_queued(model: Path) -> None:
    """The queue has room for one request. The second arrives before the first is reported."""
    async with serving(model, FakeScheduler(permits=0)) as served:
        served.scheduler.set_queue(num_waiting=2, max_num_waiting=3, seconds_per_request=0.1)
        await full_for(served, 0.1)
        stream = Stream(served)
        await until(lambda: len(served.scheduler.adds) == 1)
        refused = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert refused.status_code == 503
        served.scheduler.run_freely()
        await stream.task
        assert (await served.http.post("/v1/completions", json={"prompt": "the"})).is_success
        assert len(served.scheduler.adds) == 2


async def test_deadlines_travel_to_the_scheduler(model: Path) -> None:
    scheduler = FakeScheduler()
    async with serving(model, scheduler) as served:
        request = gateway_pb2.GenerateRequest(token_ids={"ids": [5]}, sampling={"max_tokens": 1})
        await served.stub.Generate(request, timeout=20).read()
        await served.stub.Generate(request).read()
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            headers = {"x-request-timeout": "20.5"}
            assert (await served.http.post(path, json=body, headers=headers)).is_success
        grpc_one, without, *http_ones = [add.timeout_millis for add in scheduler.adds]
        assert 15_000 < grpc_one <= 22_000  # gRPC rounds timeouts up
        assert without == 0
        assert all(15_000 < millis <= 20_500 for millis in http_ones)


async def test_a_request_ends_at_its_deadline(model: Path) -> None:
    scheduler = FakeScheduler(permits=3)
    async with serving(model, scheduler) as served:
        headers = {"X-Request-Timeout": "0.3"}
        stream = Stream(served, headers=headers)
        await until(lambda: len(stream.token_ids) == 3)
        late = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert late.status_code == 504
        assert late.json()["error"]["type"] == "timeout_error"
        await stream.task
        assert stream.token_ids == expected(3)
        assert (stream.error or {})["code"] == "deadline_exceeded"
        await until(lambda: scheduler.num_running == 0)
        assert served.gateway.gate.inside == 0


async def test_a_request_that_waits_for_a_replica_waits_until_its_deadline(model: Path) -> None:
    scheduler = FakeScheduler()
    async with serving(model, scheduler) as served:
        await scheduler.die()
        await until(lambda: served.gateway.membership.num_ready == 0)
        late = await served.http.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "0.2"}
        )
        assert late.status_code == 504
        assert served.gateway.fleet.num_waiting == 0
        call = served.stub.Generate(gateway_pb2.GenerateRequest(text="a"), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.gateway.fleet.num_waiting == 0)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "soon", "1e9"])
async def test_a_timeout_that_is_none_is_refused(model: Path, value: str) -> None:
    async with serving(model, FakeScheduler()) as served:
        answer = await served.http.post(
            "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": value}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Timeout"
