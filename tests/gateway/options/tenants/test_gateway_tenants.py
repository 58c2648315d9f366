"""The tenant of an API key's requests reaches the sequences that are sent to schedulers."""

import asyncio
from pathlib import Path

from stepwell.gateway.v1 import gateway_pb2

from services.gateway.core.caller import ANYONE
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until


def running_tenants(served: Serving) -> list[Tenant]:
    (replica,) = served.gateway.membership.replicas
    return [inflight.request.caller for inflight in replica.running.values()]


async def test_a_request_has_the_tenant_of_its_key_over_http_and_grpc(model: Path) -> None:
    """Each key in `api_keys` has its own tenant."""
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler, api_keys=("one", "two")) as served:
        body = {"prompt": "a", "max_tokens": 1}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        asked: list[asyncio.Future[object]] = []
        for path, json, key in (
            ("/v1/completions", body, "one"),
            ("/v1/chat/completions", chat, "two"),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            asked.append(asyncio.ensure_future(served.http.post(path, json=json, headers=headers)))
            await until(lambda: len(running_tenants(served)) == len(asked))
        request = gateway_pb2.GenerateRequest(text="a")
        call = served.stub.Generate(request, metadata=(("authorization", "Bearer two"),))
        await until(lambda: len(running_tenants(served)) == 3)
        names = [tenant.caller_id for tenant in running_tenants(served)]
        assert names == ["key-1", "key-2", "key-2"]
        call.cancel()
        scheduler.run_freely()
        await asyncio.gather(*asked)


async def test_without_keys_all_requests_are_anyones(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        asked = asyncio.ensure_future(served.http.post("/v1/completions", json={"prompt": "a"}))
        call = served.stub.Generate(gateway_pb2.GenerateRequest(text="a"))
        await until(lambda: len(running_tenants(served)) == 2)
        assert running_tenants(served) == [ANYONE, ANYONE]
        call.cancel()
        scheduler.run_freely()
        await asked
