"""The access log has one line for each call. Every log line of a request has the request's ids."""

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.process.logs import REQUEST_FIELDS
from services.gateway.core.request.inference import Inference
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving, until
from tests.gateway.streams import Stream

LOGGER = "services.gateway.adapters.telemetry.access_log"
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"X-Request-Id": "mine", "traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
SECRET = "hello world"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {**vars(record), "line": record.getMessage()}
        for record in caplog.records
        if record.name == LOGGER
    ]


async def the_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    await until(lambda: len(lines(caplog)) == 1)
    return lines(caplog)[0]


async def test_a_completion_is_one_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = scheduler_pb2.RequestTimes(
        queue_nanos=4_000_000, prefill_nanos=5_000_000, decode_nanos=6_000_000
    )
    scheduler = FakeScheduler(num_cached_tokens=1, times=times)
    async with serving(model, scheduler) as served:
        body = {"prompt": SECRET, "max_tokens": 3, "seed": 1}
        headers = HEADERS | {"Authorization": "Bearer hush"}
        answer = await served.http.post("/v1/completions?key=secret", json=body, headers=headers)
        line = await the_line(caplog)
        assert line["line"] == "POST /v1/completions 200"
        assert line["levelname"] == "INFO"
        usage = answer.json()["usage"]
        wanted = {
            "protocol": "http",
            "request_id": "mine",
            "trace_id": TRACE,
            "num_prompt_tokens": usage["prompt_tokens"],
            "num_cached_tokens": 1,
            "num_output_tokens": 3,
            "finish_reason": "length",
            "queue_seconds": 0.004,
            "inference_seconds": 0.011,
            "replica": scheduler.address,
            "num_sent": 1,
        }
        assert wanted.items() <= line.items()
        assert line["client"].startswith("127.0.0.1:")
        assert 0 < line["time_to_first_token"] <= line["seconds"]
        for text in (SECRET, answer.json()["choices"][0]["text"], "secret", "hush"):
            assert text not in str({name: value for name, value in line.items() if name != "args"})


async def test_what_goes_wrong_is_in_the_line(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(model, FakeScheduler()) as served:
        await served.http.post("/v1/completions", json={"prompt": "a", "top_p": 7})
        line = await the_line(caplog)
        assert (line["line"], line["error"]) == ("POST /v1/completions 400", "invalid_argument")
        caplog.clear()
        await served.http.get("/no%0Athing")
        line = await the_line(caplog)
        assert (line["line"], line["error"]) == ("GET /no%0Athing 404", "not_found")
        caplog.clear()
        await served.http.get("/v1/models/another")
        line = await the_line(caplog)
        assert (line["line"], line["error"]) == ("GET /v1/models/another 404", "model_not_found")


async def test_a_client_that_goes_away_is_a_line(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        await until(lambda: scheduler.num_running == 1)
        stream.task.cancel()
        line = await the_line(caplog)
        assert (line["line"], line["error"]) == ("POST /v1/completions 499", "cancelled")


async def test_a_grpc_call_is_one_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(model, FakeScheduler()) as served:
        metadata = (("traceparent", HEADERS["traceparent"]),)
        request = gateway_pb2.GenerateRequest(
            text=SECRET, request_id="mine", sampling={"max_tokens": 2}
        )
        async for _ in served.stub.Generate(request, metadata=metadata):
            pass
        line = await the_line(caplog)
        assert line["line"] == "POST /stepwell.gateway.v1.Inference/Generate OK"
        wanted = {"protocol": "grpc", "request_id": "mine", "trace_id": TRACE, "num_sent": 1}
        assert wanted.items() <= line.items()
        caplog.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.Generate(gateway_pb2.GenerateRequest(model="other")).read()
        line = await the_line(caplog)
        assert line["line"] == "POST /stepwell.gateway.v1.Inference/Generate NOT_FOUND"
        assert line["error"] == "model_not_found"


async def test_probes_are_not_logged_at_info(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    async with serving(model, FakeScheduler()) as served:
        await served.http.get("/health")
        assert (await the_line(caplog))["levelname"] == "DEBUG"


async def test_it_can_be_turned_off(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(model, FakeScheduler(), access_log=False) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 200
        await until(lambda: served.gateway.gate.inside == 0)
        assert lines(caplog) == []


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_lines_that_are_logged_meanwhile_name_the_request(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, api: str
) -> None:
    """The logged line is an internal error. The log formatter reads the ids of the request from the
    context variable REQUEST_FIELDS.
    """
    seen: list[Any] = []

    async def prepare(*_args: object, **_named: object) -> None:
        seen.append(dict(REQUEST_FIELDS.get() or {}))
        raise ZeroDivisionError

    monkeypatch.setattr(Inference, "prepare", prepare)
    async with serving(model, FakeScheduler()) as served:
        if api == "http":
            await served.http.post("/v1/completions", json={"prompt": "a"}, headers=HEADERS)
        else:
            request = gateway_pb2.GenerateRequest(text="a", request_id="mine")
            metadata = (("traceparent", HEADERS["traceparent"]),)
            with pytest.raises(grpc.aio.AioRpcError):
                await served.stub.Generate(request, metadata=metadata).read()
    assert seen == [{"request_id": "mine", "trace_id": TRACE}]
    assert any("defect" in record.getMessage() for record in caplog.records)
