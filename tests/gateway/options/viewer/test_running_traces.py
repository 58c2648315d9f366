"""Running requests, sampled or not, are in the list of traces and can be read as traces."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import Stream

RUNNING = "stepwell.is_running"


async def begun(served: Serving, name: str) -> Stream:
    (scheduler,) = served.schedulers
    num_running = scheduler.num_running
    stream = Stream(served, headers={"X-Request-Id": name})
    await until(lambda: scheduler.num_running == num_running + 1)
    return stream


async def read(served: Serving, name: str) -> dict[str, Any]:
    answer = await served.http.get(f"/traces/{name}")
    assert answer.status_code == 200, answer.text
    Documented((await served.http.get("/openapi.json")).json()).check("/traces/{name}", answer)
    trace: dict[str, Any] = answer.json()
    return trace


async def test_a_request_that_runs_has_its_spans_so_far(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        stream = await begun(served, "mine")
        trace = await read(served, "mine")
        assert (trace["is_running"], trace["is_complete"]) == (True, False)
        assert trace["request_id"].endswith("mine")
        assert {span["name"]: span["attributes"].get(RUNNING) for span in trace["spans"]} == {
            "text_completion tiny": True,
            "gateway.admit": None,
            "gateway.read": None,
            "gateway.parse": None,
            "gateway.tokenize": None,
            "gateway.prepare": None,
            "gateway.generate": True,
            "gateway.route": None,
            "gateway.engine": True,
        }
        (asked,) = scheduler.asked_for_spans[-1].requests
        engine = next(span for span in trace["spans"] if span["name"] == "gateway.engine")
        assert asked.request_id == scheduler.adds[0].request_id
        assert asked.traceparent == f"00-{trace['trace_id']}-{engine['span_id']}-01"
        root, *others = trace["spans"]
        parts = [span for span in others if span["depth"] == 1]
        assert sum(part["seconds"] for part in parts) == pytest.approx(root["seconds"])
        again = await read(served, trace["trace_id"])
        assert again["spans"][0]["seconds"] > root["seconds"]
        scheduler.run_freely()
        await stream.task
        ended = await served.http.get("/traces/mine")
        assert ended.status_code == 404
        assert "keeps no traces" in ended.json()["error"]["message"]


async def test_requests_that_run_are_listed_before_those_that_are_kept(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        document = Documented((await served.http.get("/openapi.json")).json())
        streams = [await begun(served, name) for name in ("first", "second")]

        async def listed(order: str) -> list[str]:
            answer = await served.http.get(f"/traces?order={order}")
            document.check("/traces", answer)
            found = answer.json()
            assert (found["are_kept"], found["num_kept"]) == (False, 0)
            assert all(trace["is_running"] for trace in found["traces"])
            return [trace["request_id"].rpartition("-")[2] for trace in found["traces"]]

        assert await listed("newest") == ["second", "first"]
        assert await listed("slowest") == ["first", "second"]
        assert await listed("failed") == []
        scheduler.run_freely()
        for stream in streams:
            await stream.task
        assert await listed("newest") == []
