"""The span of a failed call has the error code, and shows whether the server is at fault."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.gateway.spans import Tracer

HTTP, GRPC = "http.response.status_code", "rpc.response.status_code"
FAULT = {
    common_pb2.FINISH_REASON_NAN_IN_LOGITS: True,
    common_pb2.FINISH_REASON_GRAMMAR_ERROR: False,
}


async def call(served: Serving, api: str, **parameters: Any) -> None:
    if api == "http":
        answer = await served.http.post("/v1/completions", json={"prompt": "a", **parameters})
        assert answer.is_error
        return
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in served.stub.Generate(
            gateway_pb2.GenerateRequest(text="a", sampling=parameters)
        ):
            pass


def codes(span: ReadableSpan) -> dict[str, object]:
    assert span.attributes is not None
    return {name: span.attributes[name] for name in (HTTP, GRPC) if name in span.attributes}


def assert_fault(span: ReadableSpan, error: str, *, is_server: bool) -> None:
    assert span.attributes is not None
    assert span.status.status_code is (StatusCode.ERROR if is_server else StatusCode.UNSET)
    assert span.attributes.get("error.type") == (error if is_server else None)
    assert span.attributes.get("stepwell.client_error") == (None if is_server else error)


@pytest.mark.parametrize(
    ("api", "code"), [("http", {HTTP: 400}), ("grpc", {GRPC: "INVALID_ARGUMENT"})]
)
async def test_an_error_of_the_client_leaves_the_status_unset(
    model: Path, api: str, code: dict[str, object]
) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(), tracing=tracer.tracing) as served:
        await call(served, api, top_p=7)
        root = (await tracer.trace()).root
        assert codes(root) == code
        assert_fault(root, "invalid_argument", is_server=False)
        assert "top_p" in root.attributes["stepwell.client_error.message"]


@pytest.mark.parametrize(
    ("headers", "status", "error"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/json", "Host": "elsewhere"}, 421, "misdirected_request"),
    ],
)
async def test_a_request_that_is_refused_before_its_route_has_the_error_of_its_status(
    model: Path, headers: dict[str, str], status: int, error: str
) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(), tracing=tracer.tracing) as served:
        answer = await served.http.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == status
        root = (await tracer.trace()).root
        assert codes(root) == {HTTP: status}
        assert_fault(root, error, is_server=False)
        assert root.attributes is not None
        message = root.attributes["stepwell.client_error.message"]
        assert message == answer.json()["error"]["message"]


@pytest.mark.parametrize(("api", "code"), [("http", {HTTP: 500}), ("grpc", {GRPC: "INTERNAL"})])
async def test_an_error_of_the_server_is_the_status(
    model: Path, api: str, code: dict[str, object]
) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(engine_error="NaN"), tracing=tracer.tracing) as served:
        await call(served, api)
        root = (await tracer.trace()).root
        assert codes(root) == code
        assert_fault(root, "nan_in_logits", is_server=True)
        assert root.status.description


async def test_a_refusal_of_a_full_server_is_its_error_over_http_and_not_over_grpc(
    model: Path,
) -> None:
    tracer = Tracer()
    async with serving(
        model, FakeScheduler(permits=0), tracing=tracer.tracing, max_concurrent_requests=1
    ) as served:
        runs = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
        await until(lambda: served.scheduler.num_running == 1)
        await call(served, "http")
        await call(served, "grpc")
        first, second = (await tracer.trace(0)).root, (await tracer.trace(1)).root
        assert (codes(first), first.status.status_code) == ({HTTP: 503}, StatusCode.ERROR)
        assert (codes(second), second.status.status_code) == (
            *({GRPC: "RESOURCE_EXHAUSTED"}, StatusCode.UNSET),
        )
        served.scheduler.run_freely()
        await runs


@pytest.mark.parametrize("reason", FAULT)
async def test_what_fails_after_a_stream_began_is_judged_by_its_error(
    model: Path, reason: common_pb2.FinishReason
) -> None:
    tracer, fake = Tracer(), FakeScheduler(permits=2, engine_reason=reason)
    async with serving(model, fake, tracing=tracer.tracing) as served:
        body = {"prompt": "a", "max_tokens": 50, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            fake.engine_error = "it is said to fail"
            fake.run_freely()
            async for _ in lines:
                pass
        root = (await tracer.trace()).root
        assert codes(root) == {HTTP: 200}
        name = common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        assert_fault(root, name, is_server=FAULT[reason])


async def test_a_client_that_goes_away_before_the_answer_was_sent_no_code(model: Path) -> None:
    tracer, fake = Tracer(), FakeScheduler(permits=0)
    async with serving(model, fake, tracing=tracer.tracing) as served:
        with suppress(httpx.ReadTimeout):
            await served.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.2)
        root = (await tracer.trace()).root
        assert codes(root) == {}
        assert_fault(root, "cancelled", is_server=False)
