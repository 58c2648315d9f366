"""Clients that stop reading: they are cut off after a bound, and others notice nothing."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.gateway.v1 import gateway_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until

LONG = {"max_model_len": 400_000, "max_request_tokens": 400_000, "tokens_per_step": 500}
SLOWLY_SECONDS = 0.04


def long_request() -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 300_000, "logprobs": 10}
    )


def num_cut(served_metrics: str, protocol: str) -> float:
    for line in served_metrics.splitlines():
        if line.startswith("stepwell_gateway_readers_cut_total") and f'"{protocol}"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


async def read_on(call: Any) -> list[int]:
    token_ids: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        token_ids += message.token_ids
        await asyncio.sleep(SLOWLY_SECONDS)
    return token_ids


async def metrics(served: Serving) -> str:
    return (await served.http.get("/metrics")).text


async def test_a_grpc_client_that_stops_reading_is_cut(model: Path) -> None:
    scheduler = FakeScheduler(**LONG)
    async with serving(model, scheduler, reader_timeout_seconds=0.5) as served:
        call = served.stub.Generate(long_request())
        await call.read()
        await until(lambda: served.gateway.gate.inside == 0, 10)
        await until(lambda: scheduler.num_running == 0)
        assert num_cut(await metrics(served), "grpc") == 1
        # What was sent before it stopped is still there, and then the reason.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_on(call), 10)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert "took no message for 0.5 s" in (caught.value.details() or "")


async def test_a_slow_but_steady_grpc_reader_is_not_cut(model: Path) -> None:
    scheduler = FakeScheduler(**LONG | {"tokens_per_step": 50})
    async with serving(model, scheduler, reader_timeout_seconds=1.0) as served:
        request = long_request()
        request.sampling.max_tokens = 3000
        call = served.stub.Generate(request)
        assert len(await read_on(call)) == 3000
