"""A tenant sees only its own requests (running, waiting and finished ones) at a gateway."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.keys.api_keys import TenantRecord
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import FileKeyring, bearer
from tests.gateway.serving import serving, until
from tests.gateway.spans import Tracer, assert_adds_up
from tests.gateway.streams import Stream
from tests.plain_http import async_http_client

KEYS = ("one", "two")
OPERATOR = {"admin_address": "127.0.0.1:0", "admin_key": "operator"}


async def read(http: httpx.AsyncClient, path: str, key: str) -> dict[str, Any]:
    answer = await http.get(path, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def running(http: httpx.AsyncClient, key: str) -> list[str]:
    (replica,) = (await read(http, "/activity", key))["replicas"]
    return sorted(request["request_id"][:8] for request in replica["requests"])


async def pausing(http: httpx.AsyncClient, key: str) -> list[str]:
    (replica,) = (await read(http, "/activity", key))["replicas"]
    return [program["program"] for program in replica["programs"]]


async def traced(http: httpx.AsyncClient, key: str) -> list[str]:
    traces = (await read(http, "/traces", key))["traces"]
    return sorted(trace["request_id"] for trace in traces)


async def test_a_tenant_sees_its_own_requests_and_an_operator_all(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scheduler = FakeScheduler(permits=0)
    settings = {"api_keys": KEYS, "trace_address": "127.0.0.1:0", "trace_sample_ratio": 1.0}
    async with (
        serving(model, scheduler, **settings, **OPERATOR) as served,
        async_http_client(base_url=f"http://{served.admin_address}") as admin,
    ):
        streams = [Stream(served, headers=bearer(key) | {"X-Request-Id": key}) for key in KEYS]
        await until(lambda: scheduler.num_running == 2)
        scheduler.programs = [
            scheduler_pb2.PausedProgram(
                program=add.request_id.removeprefix("cmpl-"), tenant=add.tenant
            )
            for add in scheduler.adds
        ]
        for key in KEYS:
            assert await running(served.http, key) == ["", f"cmpl-{key}"]
            assert sorted(await pausing(served.http, key)) == ["", key]
        assert await running(admin, "operator") == ["cmpl-one", "cmpl-two"]
        assert sorted(await pausing(admin, "operator")) == ["one", "two"]
        for is_running in (True, False):
            for key, other in permutations(KEYS):
                assert await traced(served.http, key) == [f"cmpl-{key}"]
                for name, status in ((key, 200), (other, 404)):
                    answer = await served.http.get(f"/traces/cmpl-{name}", headers=bearer(key))
                    assert answer.status_code == status
            assert await traced(admin, "operator") == ["cmpl-one", "cmpl-two"]
            if is_running:
                scheduler.run_freely()
                for stream in streams:
                    await stream.task
        for path in ("/activity", "/traces"):
            assert (await admin.get(path, headers=bearer("one"))).status_code == 401
    lines = [record for record in caplog.records if record.message.startswith("POST /v1/compl")]
    assert sorted(line.tenant for line in lines) == ["key-1", "key-2"]


async def test_of_a_trace_that_tenants_share_each_sees_its_own_requests(model: Path) -> None:
    """Clients choose trace ids and request ids, so two tenants may choose the same ones. The first
    request ended before the second one began, and the third still runs.
    """
    waited_for = [
        scheduler_pb2.TimePart(name="slots", nanos=1000, waited_for=f"cmpl-{key}") for key in KEYS
    ]
    scheduler = FakeScheduler()
    settings = {"api_keys": KEYS, "trace_address": "127.0.0.1:0", "trace_sample_ratio": 1.0}
    trace_id = "a" * 32
    trace = {"traceparent": f"00-{trace_id}-{'b' * 16}-01"}

    async def check(http: httpx.AsyncClient) -> None:
        for key, other in permutations(KEYS):
            assert await traced(http, key) == [f"cmpl-{key}"]
            for name in (key, trace_id):
                body = await read(http, f"/traces/{name}", key)
                assert body["request_id"] == f"cmpl-{key}"
                tenant = body["spans"][0]["attributes"]["stepwell.tenant"]
                assert tenant == f"key-{KEYS.index(key) + 1}"
                assert f"cmpl-{other}" not in json.dumps(body)
            listed = (await read(http, "/traces", key))["traces"]
            assert f"cmpl-{other}" not in json.dumps(listed)
            assert (await http.get(f"/traces/{other}", headers=bearer(key))).status_code == 404

    async with serving(model, scheduler, **settings) as served:
        for key, part in zip(KEYS, reversed(waited_for), strict=True):
            scheduler.times = scheduler_pb2.RequestTimes(queue_nanos=1000, parts=[part])
            stream = Stream(served, headers=bearer(key) | trace | {"X-Request-Id": key})
            await stream.task
        await check(served.http)
        scheduler.permits = 0
        stream = Stream(served, headers=bearer("one") | trace | {"X-Request-Id": "one"})
        await until(lambda: scheduler.num_running == 1)
        body = await read(served.http, f"/traces/{trace_id}", "one")
        assert body["is_running"]
        assert "cmpl-two" not in json.dumps(body)
        scheduler.run_freely()
        await stream.task


async def test_a_request_id_that_tenants_share_shows_no_trace_id(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    settings = {"api_keys": KEYS, "trace_address": "127.0.0.1:0", "trace_sample_ratio": 1.0}
    async with serving(model, scheduler, **settings) as served:
        same = {"X-Request-Id": "same"}
        streams = [Stream(served, headers=bearer(key) | same) for key in KEYS]
        await until(lambda: scheduler.num_running == 2)
        for key in KEYS:
            (replica,) = (await read(served.http, "/activity", key))["replicas"]
            assert sorted(bool(one["trace_id"]) for one in replica["requests"]) == [False, True]
        scheduler.run_freely()
        for stream in streams:
            await stream.task


async def test_what_waits_at_the_gateway_is_shown_with_its_reason(model: Path) -> None:
    fake = FakeScheduler(permits=0, max_num_seqs=1)
    async with serving(model, fake, api_keys=KEYS) as served:
        streams = [Stream(served, headers=bearer("one")) for _ in range(3)]
        await until(lambda: served.gateway.fleet.num_waiting == 1)
        for key, shown in (("one", "cmpl-"), ("two", "")):
            (queued,) = (await read(served.http, "/activity", key))["queued"]
            assert (queued["wait_reason"], queued["request_id"][:5]) == ("no_slot", shown)
            assert queued["seconds"] >= 0
        fake.run_freely()
        for stream in streams:
            await stream.task


async def test_the_limits_of_a_tenant_are_a_wait_of_their_own(model: Path, tmp_path: Path) -> None:
    tracer, ring = Tracer(), FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", tokens_per_minute=1000))
    keys = {"api_key_file": ring.path}
    async with serving(model, FakeScheduler(), tracing=tracer.tracing, **keys) as served:
        answer = await served.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=bearer(key)
        )
        assert answer.status_code == 200
        trace = await tracer.trace()
        assert_adds_up(trace)
        assert trace.root.attributes["stepwell.tenant"] == "acme"
        assert trace.only("gateway.wait").attributes["stepwell.wait_reason"] == "limits"
