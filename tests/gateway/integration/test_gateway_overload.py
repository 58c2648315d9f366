"""More requests than are served, and requests whose clients wait only so long."""

from pathlib import Path

import grpc
import pytest
from stepwell.gateway.v1 import gateway_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving, until
from tests.gateway.streams import Stream, expected

LONG_TEXT = "the " * 600


async def test_a_full_system_refuses_before_it_tokenizes(model: Path) -> None:
    """A prompt that is too long is not even looked at: the answer is 429, not 400."""
    scheduler = FakeScheduler(permits=0, max_requests=1)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        await until(lambda: scheduler.num_running == 1)
        too_long = {"prompt": LONG_TEXT}
        assert (await served.http.post("/v1/completions", json=too_long)).status_code == 400
        full = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert (full.status_code, full.headers["retry-after"]) == (429, "2")
        num_heard = len(scheduler.adds)
        refused = await served.http.post("/v1/completions", json=too_long)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["code"] == "queue_full"
        call = served.stub.Generate(gateway_pb2.GenerateRequest(text=LONG_TEXT))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(scheduler.adds) == num_heard
        # It is asked again once a request leaves the queue, or some time has passed.
        scheduler.run_freely()
        await stream.task
        assert (await served.http.post("/v1/completions", json={"prompt": "the"})).is_success


async def test_a_refusal_of_the_impatient_says_nothing_of_others(model: Path) -> None:
    scheduler = FakeScheduler(permits=0, max_requests=1)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        await until(lambda: scheduler.num_running == 1)
        body, hasty = {"prompt": "the"}, {"X-Request-Timeout": "0.5"}
        for num_heard in (2, 2):
            answer = await served.http.post("/v1/completions", json=body, headers=hasty)
            assert answer.status_code == 429
            assert len(scheduler.adds) == num_heard
        assert (await served.http.post("/v1/completions", json=body)).status_code == 429
        assert len(scheduler.adds) == 3
        scheduler.run_freely()
        await stream.task


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
        assert 15_000 < grpc_one <= 22_000  # grpc rounds up what it sends
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
        await until(lambda: served.gateway.fleet.num_ready == 0)
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
