"""Each of two gateways counts the other gateway's requests, one step after they arrive."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.telemetry.tracing import configure_tracing
from services.gateway.__main__ import Gateway
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer
from services.gateway.settings import GatewaySettings
from services.scheduler.adapters.gateways.queue_watch import QueueWatch
from tests.gateway.serving import until
from tests.gateway.tiny_tokenizer import write_tokenizer
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import Replica, serving_replica
from tests.scheduler.story import prompt

NUM_REQUESTS = 12
NUM_TOKENS = 1900
"""The length of an answer, so that no answer ends before the last request arrives."""


@asynccontextmanager
async def gateway_before(
    model: Path, replicas: list[Replica]
) -> AsyncIterator[tuple[Gateway, gateway_pb2_grpc.InferenceStub]]:
    settings = GatewaySettings(
        model=model,
        served_model_name="paged",
        schedulers=tuple(replica.address for replica in replicas),
        address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        routing_policy="least-loaded",
        drain_seconds=0.0,
    )
    gateway = Gateway(settings, load_tokenizer(model), configure_tracing("gateway", "", 0.0))
    addresses = await gateway.start()
    async with open_channel(addresses.grpc) as channel:
        try:
            await until(lambda: gateway.membership.num_ready == len(replicas))
            yield gateway, gateway_pb2_grpc.InferenceStub(channel)
        finally:
            await gateway.drain()


def ask(stub: gateway_pb2_grpc.InferenceStub, number: int) -> Any:
    """Begins a long answer."""
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt(5, 10 * number)),
        sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        ignore_eos=True,
    )
    return stub.Generate(request)


def held(gateway: Gateway) -> Counter[str]:
    """Maps each replica's address to the number of its requests that a gateway counts."""
    return Counter({one.address: one.load.num_requests for one in gateway.membership.replicas})


async def test_requests_through_two_gateways_are_spread_as_through_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways do not query queues here, so they learn the loads of replicas only from steps."""
    monkeypatch.setattr(QueueWatch, "_look", lambda _: None)
    model = write_tokenizer(tmp_path / "paged")
    async with AsyncExitStack() as stack:
        workers = [
            FakeWorker(num_blocks=8000, max_model_len=2000, max_num_seqs=NUM_REQUESTS)
            for _ in range(2)
        ]
        replicas = [await stack.enter_async_context(serving_replica(one)) for one in workers]
        pairs = [await stack.enter_async_context(gateway_before(model, replicas)) for _ in range(2)]
        gateways = [gateway for gateway, _ in pairs]
        calls = []
        for number in range(NUM_REQUESTS):
            calls.append(ask(pairs[number % 2][1], number))
            await calls[-1].read()
            for worker in workers:
                worker.going.clear()
            await until(lambda count=number + 1: all(held(g).total() == count for g in gateways))
            views = [held(gateway) for gateway in gateways]
            assert views[0] == views[1], "both see the same"
            assert max(views[0].values()) - min(views[0].values()) <= 1
            for worker in workers:
                worker.going.set()
