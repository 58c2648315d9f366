"""Two tenants at a real gateway. One sends more requests than the replicas can run."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stepwell.gateway.v1 import gateway_pb2

from services.common.pool.block_hash import unpack_token_ids
from services.common.telemetry.tracing import configure_tracing
from services.gateway.core.caller import ANYONE
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.options.tenants.tenant_fleet import num_waiting, queues_of
from tests.gateway.raw_http import post_head
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.streams import Stream, expected

KEYS = ("floods", "quiet")
FLOODS, QUIET = ({"Authorization": f"Bearer {key}"} for key in KEYS)
NUM_PLACES = 8


def spans_named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def flooded(served: Serving, num_waiting_then: int) -> list[Stream]:
    """Sends requests of tenant FLOODS until its slots are full and `num_waiting_then` requests
    wait. The scheduler runs no steps, so that no request ends.
    """
    streams = [Stream(served, headers=FLOODS) for _ in range(NUM_PLACES + 1)]
    await until(lambda: len(served.scheduler.adds) == NUM_PLACES + 1)
    streams += [Stream(served, headers=FLOODS) for _ in range(num_waiting_then)]
    await until(lambda: num_waiting(served.gateway.fleet, "key-1") == num_waiting_then)
    return streams


async def test_a_flood_waits_at_the_gateway_and_gives_back_slots_to_another_tenant(
    model: Path,
) -> None:
    """The sequences that release their slots continue later, and lose no token."""
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("gateway", "", 1.0, exporter=exporter)
    scheduler = FakeScheduler(permits=0, max_num_seqs=NUM_PLACES)
    async with serving(model, scheduler, tracing=tracing, api_keys=KEYS) as served:
        streams = await flooded(served, 20)
        scheduler.allow(5)
        await until(lambda: all(len(stream.token_ids) == 5 for stream in streams[: NUM_PLACES + 1]))
        quiet = [Stream(served, headers=QUIET) for _ in range(2)]
        await until(lambda: len(scheduler.adds) == NUM_PLACES + 3)
        await until(lambda: len(scheduler.aborts) == 3)
        metrics = await served.metrics()
        assert 'stepwell_tenant_num_waiting{tenant="key-1"} 23.0' in metrics
        assert 'stepwell_tenant_num_running{tenant="key-1"} 6.0' in metrics
        assert 'stepwell_tenant_num_waiting{tenant="key-2"} 0.0' in metrics
        assert 'stepwell_tenant_num_running{tenant="key-2"} 2.0' in metrics
        scheduler.run_freely()
        await asyncio.gather(*(stream.task for stream in [*streams, *quiet]))
        assert all(stream.token_ids == expected(30) for stream in [*streams, *quiet])
        await until(lambda: len(spans_named(exporter, "text_completion tiny")) == len(streams) + 2)
        waits = spans_named(exporter, "gateway.wait")
        reasons = Counter(wait.attributes["stepwell.wait_reason"] for wait in waits)
        assert reasons == {"no_slot": 1, "turn": 19}
        given_back = spans_named(exporter, "gateway.resubmit")
        causes = [span.attributes["stepwell.resubmit.cause"] for span in given_back]
        assert causes == ["preempted"] * 3
        assert all(span.end_time > span.start_time for span in [*waits, *given_back])
        resumed = [add for add in scheduler.adds if add.output_token_ids]
        assert {len(unpack_token_ids(add.output_token_ids)) for add in resumed} == {5}
        metrics = (await served.http.get("/metrics")).text
        assert 'queue_seconds_count{model_name="tiny",reason="preempted"} 3.0' in metrics


async def test_a_tenant_with_too_many_waiting_is_refused_before_its_body_is_read(
    model: Path,
) -> None:
    scheduler = FakeScheduler(permits=0, max_num_seqs=NUM_PLACES)
    settings = {"api_keys": KEYS, "max_num_waiting_per_tenant": 3}
    async with serving(model, scheduler, **settings) as served:
        streams = await flooded(served, 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.http.base_url.port)
        writer.write(post_head("/v1/completions", 1000, "Authorization: Bearer floods"))
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 429 ")
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            error = json.loads(await reader.readexactly(size))["error"]
        assert error["code"] == "tenant_queue_full"
        assert "retry-after: " in head
        writer.close()
        call = served.stub.Generate(
            gateway_pb2.GenerateRequest(text="a"), metadata=(("authorization", "Bearer floods"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        quiet = Stream(served, headers=QUIET)
        scheduler.run_freely()
        await asyncio.gather(quiet.task, *(stream.task for stream in streams))
        assert quiet.token_ids == expected(30)
        metrics = (await served.http.get("/metrics")).text
        assert 'rejections_total{model_name="tiny",reason="tenant_queue_full"} 2.0' in metrics


async def test_a_deadline_that_the_queue_does_not_allow_is_refused_at_once(model: Path) -> None:
    scheduler = FakeScheduler(permits=0, max_num_seqs=NUM_PLACES)
    async with serving(model, scheduler, api_keys=KEYS) as served:
        scheduler.set_queue(
            num_waiting=0, max_num_waiting=100, seconds_per_request=1.0, service_seconds=2.0
        )
        (replica,) = served.gateway.membership.replicas
        await until(lambda: replica.queue is not None)
        streams = await flooded(served, 5)
        headers = {"X-Request-Timeout": "6"}
        refused = await served.http.post(
            "/v1/completions", json={"prompt": "a"}, headers=FLOODS | headers
        )
        assert refused.status_code == 504
        assert refused.json()["error"]["code"] == "deadline_too_short"
        call = served.stub.Generate(
            gateway_pb2.GenerateRequest(text="a"),
            metadata=(("authorization", "Bearer floods"),),
            timeout=6,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "would wait for about" in str(caught.value.details())
        quiet = Stream(served, headers=QUIET | headers)
        scheduler.run_freely()
        await asyncio.gather(quiet.task, *(stream.task for stream in streams))
        assert quiet.token_ids == expected(30)


async def test_a_client_that_goes_away_while_it_waits_leaves_its_slot_to_the_next(
    model: Path,
) -> None:
    scheduler = FakeScheduler(permits=0, max_num_seqs=NUM_PLACES)
    async with serving(model, scheduler, api_keys=KEYS) as served:
        streams = await flooded(served, 2)
        streams[-2].task.cancel()
        await until(lambda: num_waiting(served.gateway.fleet, "key-1") == 1)
        streams[0].task.cancel()
        await until(lambda: num_waiting(served.gateway.fleet, "key-1") == 0)
        await until(lambda: len(scheduler.adds) == NUM_PLACES + 2)
        scheduler.run_freely()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        assert queues_of(served.gateway.fleet).slots.usage(Tenant("key-1")).num_running == 0


async def test_a_burst_is_refused_by_those_of_it_that_are_still_read(model: Path) -> None:
    """Even without tenants, only as many bodies are read at once as requests fit in the queue."""
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        scheduler.set_queue(num_waiting=0, max_num_waiting=3)
        (replica,) = served.gateway.membership.replicas
        await until(lambda: replica.queue is not None)
        connections = [
            await asyncio.open_connection("127.0.0.1", served.http.base_url.port) for _ in range(5)
        ]
        for _, writer in connections:
            writer.write(post_head("/v1/completions", 1000))
        answered = [asyncio.create_task(reader.readuntil(b"\r\n")) for reader, _ in connections]
        await until(lambda: sum(task.done() for task in answered) == 2)
        assert {task.result() for task in answered if task.done()} == {
            b"HTTP/1.1 503 Service Unavailable\r\n"
        }
        assert served.gateway.gate.inside == 3
        for task in answered:
            task.cancel()
        for _, writer in connections:
            writer.close()
        await until(lambda: served.gateway.gate.inside == 0)
        assert served.gateway.fleet.arrivals.num(ANYONE) == 0
