"""Every HTTP route and gRPC method needs an API key, except those that this file lists."""

import asyncio
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from stepwell.gateway.v1 import gateway_pb2

from services.gateway.adapters.grpc.inference_servicer import METHOD_PREFIX
from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import bearer
from tests.gateway.raw_http import post_head
from tests.gateway.serving import DEADLINE_SECONDS, serving, until

KEY = (("authorization", "Bearer right"),)
WITHOUT_KEY = {"/health", "/ping", "/version", "/load", "/metrics"}
PAGES = ("/ui", "/docs", "/redoc", "/openapi.json")
METHODS = [method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Inference"].methods]


async def test_http_routes_need_a_key_before_their_bodies(model: Path) -> None:
    """The OpenAPI document lists all routes, and which of them need a key."""
    enabled = {"enable_tokenizer_info_endpoint": True}
    async with serving(model, api_keys=("right",), **enabled) as served:
        document = Documented((await served.http.get("/openapi.json")).json())
        assert document.document["paths"].keys() > WITHOUT_KEY
        for path, operations in document.document["paths"].items():
            for method, operation in operations.items():
                needs_key = path not in WITHOUT_KEY
                assert ("security" in operation) == needs_key
                for headers in ({}, bearer("righ")):
                    answer = await served.http.request(method, path, headers=headers)
                    assert (answer.status_code == 401) == needs_key, (method, path)
                document.check(path, answer)
                answer = await served.http.request(method, path, headers=bearer("right"))
                assert answer.status_code != 401, (method, path)
        for path in PAGES:
            assert (await served.http.get(path)).status_code == 200
        for path in ("/v1/completions", "/tokenize"):
            port = served.http.base_url.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post_head(path, 4_000_000, "Authorization: Bearer wrong"))
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
            writer.close()


async def test_grpc_methods_need_a_key_before_their_messages(model: Path) -> None:
    async with serving(model, api_keys=("right",)) as served:

        async def status_of(call: grpc.aio.Call) -> grpc.StatusCode:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await call.code()

        for method in METHODS:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                call = served.channel.stream_stream(METHOD_PREFIX + method)(metadata=metadata)
                assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED, method
        # No message is sent: grpc.aio reports INTERNAL if a refusal arrives during a write.
        reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        refused = reflection.ServerReflectionInfo()
        assert await status_of(refused) is grpc.StatusCode.UNAUTHENTICATED
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = reflection.ServerReflectionInfo(asked, metadata=KEY)
        assert len([answer async for answer in listed]) == 1
        assert await served.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=KEY)
        health = health_pb2_grpc.HealthStub(served.channel)
        assert await health.Check(health_pb2.HealthCheckRequest())


async def test_a_request_with_a_key_is_served(model: Path) -> None:
    async with serving(model, FakeScheduler(), api_keys=("one", "two")) as served:
        async with served.openai(api_key="three") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="tiny", prompt="a")
        async with served.openai(api_key="two") as client:
            await client.completions.create(model="tiny", prompt="a")
        ask = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        for key, status in (("one", 200), ("three", 401)):
            for headers in ({"X-Api-Key": key}, bearer(key)):
                answer = await served.http.post("/v1/messages", json=ask, headers=headers)
                assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        request = gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2})
        call = served.stub.Generate(request, metadata=[("authorization", "Bearer one")])
        assert [response async for response in call]
        await until(lambda: served.gateway.gate.inside == 0)


@pytest.mark.parametrize("key", ["schlüssel", "秘密"])
async def test_keys_need_not_be_ascii(model: Path, key: str) -> None:
    async with serving(model, api_keys=(key,)) as served:
        right = {"Authorization": f"Bearer {key}".encode()}
        wrong = {"Authorization": b"Bearer \xff\xfe"}
        assert (await served.http.get("/v1/models", headers=right)).status_code == 200
        assert (await served.http.get("/v1/models", headers=wrong)).status_code == 401
