"""The gateway as a trace store: spans arrive over OTLP, and traces are read over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from services.common.telemetry.tracing import Tracing, configure_tracing
from services.gateway.options.viewer.core.trace_store import TraceStore
from services.gateway.options.viewer.option import Viewer
from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.streams import Stream
from tests.traceparents import traceparent_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BODY = {"prompt": "the", "max_tokens": 3, "stop": ["a secret"]}


@dataclass
class Kept:
    store: TraceStore
    address: str
    """The address at which the gateway receives the spans of other services."""


@asynccontextmanager
async def keeping(
    model: Path, *schedulers: FakeScheduler, **settings: Any
) -> AsyncIterator[tuple[Serving, Kept]]:
    """A gateway that stores the traces of all requests that clients do not mark as unsampled."""
    given = {
        "trace_address": "127.0.0.1:0",
        "trace_sample_ratio": 1.0,
        "trace_store_max_per_minute": 0,
    } | settings
    async with serving(model, *schedulers, **given) as served:
        (viewer,) = (one for one in served.gateway.parts.options if isinstance(one, Viewer))
        assert viewer.store is not None
        assert viewer.address is not None
        yield served, Kept(viewer.store, viewer.address)


@asynccontextmanager
async def other_service(address: str) -> AsyncIterator[Tracing]:
    tracing = configure_tracing("scheduler", f"http://{address}", 1.0)
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.shutdown)


async def test_spans_of_all_services_are_one_tree(model: Path) -> None:
    scheduler = FakeScheduler()
    async with keeping(model, scheduler) as (served, kept):
        answer = await served.http.post("/v1/completions", json=BODY, headers=SAMPLED)
        parent = scheduler.adds[0].traceparent
        async with other_service(kept.address) as tracing:
            queue = tracing.start("first", parent, start_unix_nanos=1)
            tracing.start("inside", traceparent_of(queue)).end()
            queue.end()
            tracing.start("second", parent, attributes={"stepwell.wait_reason": "budget"}).end()
            tracing.start("a step").end()
        document = Documented((await served.http.get("/openapi.json")).json())
        read = await served.http.get(f"/traces/{answer.json()['id']}")
        document.check("/traces/{name}", read)
        trace = read.json()
        assert trace["trace_id"] == TRACE
        tree = [(span["depth"], span["name"], span["service"]) for span in trace["spans"]]
        assert tree[0] == (0, "text_completion tiny", "stepwell-gateway")
        assert (1, "gateway.tokenize", "stepwell-gateway") in tree
        engine = tree.index((2, "gateway.engine", "stepwell-gateway"))
        assert tree[engine + 1 : engine + 4] == [
            (3, "first", "stepwell-scheduler"),
            (4, "inside", "stepwell-scheduler"),
            (3, "second", "stepwell-scheduler"),
        ]
        second = trace["spans"][engine + 3]
        assert second["attributes"] == {"stepwell.wait_reason": "budget"}
        assert "a secret" not in read.text


async def test_spans_are_taken_after_the_drain_until_a_second_stop(model: Path) -> None:
    async with keeping(model, trace_linger_seconds=60.0) as (served, kept):
        stop = asyncio.Event()
        stop.set()
        serving_on = asyncio.create_task(served.gateway.serve_until(stop))
        await until(lambda: served.gateway.membership.num_ready == 0)
        with pytest.raises(httpx.ConnectError):
            await served.http.get("/health")
        async with other_service(kept.address) as tracing:
            tracing.start("a step").end()
        assert len(kept.store) == 1
        stop.set()
        await asyncio.wait_for(serving_on, DEADLINE_SECONDS)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*kept.address.split(":"))


async def test_requests_are_listed_and_steps_are_not(model: Path) -> None:
    failing = FakeScheduler()
    async with keeping(model, failing) as (served, kept):
        document = Documented((await served.http.get("/openapi.json")).json())
        first = await served.http.post("/v1/completions", json=BODY)
        failing.engine_error = "STEP_FAILED"
        await served.http.post("/v1/completions", json=BODY)
        async with other_service(kept.address) as tracing:
            tracing.start("a step").end()
        await until(lambda: len(kept.store) == 3)
        listed = await served.http.get("/traces")
        document.check("/traces", listed)
        assert listed.json()["num_kept"] == 2
        failed, fine = listed.json()["traces"]
        assert fine["request_id"] == first.json()["id"]
        assert (fine["error"], fine["attributes"]["gen_ai.usage.output_tokens"]) == (None, 3)
        assert failed["error"]
        only = (await served.http.get("/traces?order=failed")).json()["traces"]
        assert [trace["trace_id"] for trace in only] == [failed["trace_id"]]
        slowest = (await served.http.get("/traces?order=slowest&limit=1")).json()["traces"]
        assert slowest == [max((failed, fine), key=lambda trace: trace["seconds"])]
        wrong = await served.http.get("/traces?order=oldest")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "order")


async def test_a_request_that_was_not_sampled_leaves_no_trace(model: Path) -> None:
    async with keeping(model) as (served, kept):
        unsampled = {"traceparent": SAMPLED["traceparent"][:-1] + "0"}
        answer = await served.http.post("/v1/completions", json=BODY, headers=unsampled)
        missing = await served.http.get(f"/traces/{answer.json()['id']}")
        assert missing.status_code == 404
        assert "was not sampled" in missing.json()["error"]["message"]
        assert len(kept.store) == 0


async def test_without_a_store_there_are_no_traces(served: Serving) -> None:
    assert (await served.http.get("/traces")).json() == {
        "are_kept": False,
        "num_kept": 0,
        "traces": [],
    }
    missing = await served.http.get(f"/traces/{TRACE}")
    assert missing.status_code == 404
    assert "keeps no traces" in missing.json()["error"]["message"]


async def test_clients_without_the_page_have_no_traces_either(model: Path) -> None:
    async with keeping(model, ui=False) as (served, _):
        for path in ("/traces", f"/traces/{TRACE}", "/activity", "/ui", "/"):
            assert (await served.http.get(path)).status_code == 404


async def test_a_store_and_a_collector_both_get_every_span(model: Path) -> None:
    async with keeping(model) as (_, collector):
        tracing = configure_tracing("gateway", f"http://{collector.address}", 1.0)
        async with keeping(model, tracing=tracing) as (served, kept):
            await served.http.post("/v1/completions", json=BODY)
        await asyncio.to_thread(tracing.shutdown)
        (trace,) = kept.store.requests()
        sent = collector.store.find(trace.trace_id)
        assert sent is not None
        assert len(sent.spans) == len(trace.spans) > 5


async def test_the_slowest_and_what_a_list_showed_are_kept_though_they_are_not_sampled(
    model: Path,
) -> None:
    scheduler = FakeScheduler(permits=1)
    ratios = {"trace_sample_ratio": 0.0, "trace_slowest_per_minute": 1}
    async with keeping(model, scheduler, **ratios) as (served, _):
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 1)
        (running,) = (await served.http.get("/traces")).json()["traces"]
        scheduler.run_freely()
        await stream.task
        fast = [await served.http.post("/v1/completions", json=BODY) for _ in range(3)]
        whole = (await served.http.get(f"/traces/{running['trace_id']}")).json()
        assert whole["is_complete"]
        assert whole["spans"][0]["attributes"]["stepwell.kept_for"] == "slowest"
        assert whole["time"]["line"].startswith(whole["spans"][0]["attributes"]["stepwell.time"])
        missing = await served.http.get(f"/traces/{fast[-1].json()['id']}")
        assert missing.status_code == 404


async def test_the_id_of_a_request_may_contain_a_slash(model: Path) -> None:
    async with keeping(model) as (served, _):
        headers = {"X-Request-Id": "run/7"}
        answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
        for name in (answer.json()["id"], "run/7"):
            read = await served.http.get(f"/traces/{quote(name, safe='')}")
            assert read.json()["request_id"] == "cmpl-run/7"


async def test_calls_that_are_never_traced_take_no_place_of_those_that_are(model: Path) -> None:
    """The page /ui often requests /activity, which must not use up the limit on sampled traces."""
    async with keeping(model, trace_store_max_per_minute=2) as (served, _):
        for path in ("/activity", "/metrics", "/traces"):
            assert (await served.http.get(path)).is_success
        answer = await served.http.post("/v1/completions", json=BODY)
        read = await served.http.get(f"/traces/{answer.json()['id']}")
        assert read.json()["spans"][0]["attributes"]["stepwell.kept_for"] == "sampled"
