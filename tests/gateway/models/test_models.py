"""A gateway of two models: each request reaches the replica of the model that it names."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stepwell.gateway.v1 import gateway_pb2

from services.common.keys.api_keys import TenantRecord
from services.common.request.adapter import Adapter
from services.common.telemetry.metrics_servicer import COLLECT_TIMEOUT_SECONDS
from tests.e2e.browser import WIDE, chromium, page_of
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import FileKeyring
from tests.gateway.serving import Serving, serving
from tests.slowness import busy_slowness
from tests.waiting import until

CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def two(model: Path) -> AsyncIterator[Serving]:
    """A gateway of the models `tiny` and `org/large`."""
    large = FakeScheduler(model_name="org/large", max_model_len=256)
    async with serving(
        model, served_model_name="tiny", further=[large], admin_address="127.0.0.1:0"
    ) as running:
        running.schedulers.append(large)
        yield running


async def test_openais_client_lists_both_and_is_answered_by_each(two: Serving) -> None:
    tiny, large = two.schedulers
    async with two.openai() as client:
        models = {model.id: model async for model in client.models.list()}
        assert list(models) == ["tiny", "org/large"]
        assert (await client.models.retrieve("org/large")).model_extra["max_model_len"] == 256
        for name, scheduler in (("tiny", tiny), ("org/large", large)):
            num_before = len(scheduler.adds)
            answer = await client.chat.completions.create(model=name, messages=CHAT, max_tokens=3)
            assert answer.model == name
            stream = await client.completions.create(
                model=name, prompt="a", max_tokens=3, stream=True
            )
            assert {chunk.model async for chunk in stream} == {name}
            assert len(scheduler.adds) == num_before + 2
        with pytest.raises(openai.NotFoundError, match="'tiny', 'org/large'"):
            await client.chat.completions.create(model="huge", messages=CHAT)
        with pytest.raises(openai.NotFoundError, match="'tiny', 'org/large'"):
            await client.models.retrieve("huge")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
}


@pytest.mark.parametrize("path", BODIES)
async def test_each_kind_of_body_names_its_model(two: Serving, path: str) -> None:
    answer = await two.http.post(path, json={**BODIES[path], "model": "org/large"})
    assert (answer.status_code, answer.json()["model"]) == (200, "org/large")
    assert len(two.schedulers[1].adds) == 1


async def test_a_path_names_the_model_of_a_request_without_a_body(two: Serving) -> None:
    prefix = "/models/org/large"
    assert (await two.http.get(f"{prefix}/status")).json()["model"] == "org/large"
    assert (await two.http.get("/status")).json()["model"] == "tiny"
    assert (await two.http.get(f"{prefix}/v1/models")).status_code == 200
    assert (await two.http.get("/models/huge/status")).status_code == 404
    answer = await two.http.post(f"{prefix}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.json()["model"] == "org/large"


async def test_a_body_that_names_another_model_than_its_path_is_refused(two: Serving) -> None:
    url, body = "/models/tiny/v1/completions", {"model": "org/large", "prompt": "a"}
    refused = await two.http.post(url, json=body)
    assert refused.status_code == 404
    assert "'tiny', and not to 'org/large'" in refused.json()["error"]["message"]


async def test_a_body_may_be_encoded_as_itself(two: Serving) -> None:
    body = {"model": "org/large", "prompt": "a", "max_tokens": 1}
    headers = {"Content-Encoding": "identity"}
    answer = await two.http.post("/v1/completions", json=body, headers=headers)
    assert answer.json()["model"] == "org/large"


async def test_an_adapter_belongs_to_its_model(two: Serving) -> None:
    two.gateway.models[1].inference.adapters.add(Adapter(b"d" * 32, "sql", "/sql"))
    cards = {card["id"]: card for card in (await two.http.get("/v1/models")).json()["data"]}
    assert cards["sql"]["parent"] == "org/large"
    body = {"model": "sql", "prompt": "a", "max_tokens": 1}
    assert (await two.http.post("/v1/completions", json=body)).json()["model"] == "sql"
    [add] = two.schedulers[1].adds
    assert add.adapter.name == "sql"


async def test_bodies_that_name_no_model_belong_to_the_first(two: Serving) -> None:
    answer = await two.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.json()["model"] == "tiny"
    for content, status in ((b"{", 400), (b"[]", 400), (b'{"model": 5}', 400)):
        refused = await two.http.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert refused.status_code == status
    form = await two.http.post("/v1/completions", data={"model": "org/large"})
    assert form.status_code == 415
    huge = await two.http.post("/v1/completions", json={"prompt": "a" * 2**23})
    assert huge.status_code == 413


async def test_a_body_may_arrive_slowly_and_name_its_model_last(two: Serving) -> None:
    async def body() -> AsyncIterator[bytes]:
        for piece in (b'{"prompt": "ab', b'c", "max_tokens": 2, "mod', b'el": "org/lar', b'ge"}'):
            yield piece
            await asyncio.sleep(0.02)

    answer = await two.http.post(
        "/v1/completions", content=body(), headers={"Content-Type": "application/json"}
    )
    assert answer.json()["model"] == "org/large"


async def test_a_client_that_leaves_within_its_body_is_forgotten(two: Serving) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    for begun in ('{"prompt": "abc', '{"model": "org/large", "prompt": "abc'):
        host, port = two.base_url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: 100\r\n\r\n{begun}".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
    await until(lambda: not any(one.gate.inside for one in two.gateway.models))
    assert not any(scheduler.adds for scheduler in two.schedulers)


async def test_grpc_calls_reach_their_model(two: Serving) -> None:
    large = two.schedulers[1]
    listed = await two.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [model.name for model in listed.models] == ["tiny", "org/large"]
    request = gateway_pb2.GenerateRequest(model="org/large", text="hello")
    request.sampling.max_tokens = 3
    assert [piece async for piece in two.stub.Generate(request)]
    assert len(large.adds) == 1
    turns = [gateway_pb2.GenerateSessionRequest(turn=request)] * 2
    call = two.stub.GenerateSession(iter(turns))
    assert {piece.turn async for piece in call} == {0, 1}
    assert len(large.adds) == 3
    tokens = await two.stub.Tokenize(gateway_pb2.TokenizeRequest(model="org/large", text="a"))
    assert tokens.max_model_len == 256
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await two.stub.Tokenize(gateway_pb2.TokenizeRequest(model="huge", text="a"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'tiny', 'org/large'" in (refused.value.details() or "")


async def test_a_session_without_a_first_turn_ends(model: Path) -> None:
    further = [FakeScheduler(model_name="large")]
    async with serving(model, further=further, receive_timeout_seconds=0.1) as running:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await running.stub.GenerateSession(timeout=5).read()
        assert ended.value.code() is grpc.StatusCode.ABORTED


async def test_a_lost_model_does_not_disturb_the_other(two: Serving) -> None:
    tiny, large = two.schedulers
    await tiny.die()
    await until(lambda: two.gateway.membership.num_ready == 0)
    waiting = asyncio.create_task(
        two.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
    )
    answer = await two.http.post(
        "/v1/completions", json={"model": "org/large", "prompt": "a", "max_tokens": 2}
    )
    assert answer.status_code == 200
    statuses = [
        (await two.http.get(f"{prefix}/health")).status_code
        for prefix in ("", "/models/org/large", "/models/tiny")
    ]
    assert statuses == [200, 200, 503]
    await tiny.start()
    assert (await waiting).json()["model"] == "tiny"
    await large.die()
    await tiny.die()
    await until(lambda: not any(one.membership.num_ready for one in two.gateway.models))
    assert (await two.http.get("/health")).status_code == 503


async def test_each_series_is_exposed_once_and_names_its_model(two: Serving) -> None:
    for name in ("tiny", "org/large"):
        await two.http.post("/v1/completions", json={"model": name, "prompt": "a"})
    text = (await two.http.get("/metrics")).text
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text.replace("vllm:", "vllm_"))
        for sample in family.samples
    ]
    assert len(series) == len(set(series))
    ready = {labels for name, labels in series if name == "stepwell_gateway_replicas_ready"}
    assert ready == {(("model_name", "tiny"),), (("model_name", "org/large"),)}
    models = {dict(labels).get("model_name") for name, labels in series if "http_requests" in name}
    assert models == {"tiny", "org/large"}


class WithHungMetrics(FakeScheduler):
    async def _collect(self, labels: Mapping[str, str], exemplars: bool) -> bytes:
        await asyncio.Event().wait()
        return await super()._collect(labels, exemplars)


async def test_hung_replicas_of_several_models_delay_a_scrape_once(model: Path) -> None:
    hung = [WithHungMetrics(model_name=f"model-{number}", metrics="") for number in range(5)]
    async with serving(model, WithHungMetrics(metrics=""), further=hung) as served:
        began = time.monotonic()
        text = (await served.http.get("/metrics")).text
        assert time.monotonic() - began < 3 * COLLECT_TIMEOUT_SECONDS * busy_slowness()
    assert text.count("stepwell_gateway_replicas_without_metrics{") == 6


async def test_operators_calls_reach_the_model_of_their_path(two: Serving) -> None:
    tiny, large = two.schedulers
    url = f"http://{two.admin_address}"
    paused = await two.http.post(f"{url}/models/org/large/pause")
    assert paused.status_code == 200
    assert (large.operators_calls, tiny.operators_calls) != ([], [])
    assert tiny.operators_calls == []


async def test_only_callers_with_a_key_have_their_bodies_read(model: Path) -> None:
    key = "k" * 40
    async with serving(
        model,
        served_model_name="tiny",
        further=[FakeScheduler(model_name="large")],
        api_keys=(key,),
    ) as running:
        body = {"model": "large", "prompt": "a", "max_tokens": 1}
        refused = await running.http.post("/v1/completions", json=body)
        assert refused.status_code == 401
        allowed = {"Authorization": f"Bearer {key}"}
        answer = await running.http.post("/v1/completions", json=body, headers=allowed)
        assert answer.json()["model"] == "large"
        with pytest.raises(grpc.aio.AioRpcError) as call:
            await running.stub.Tokenize(gateway_pb2.TokenizeRequest(model="large", text="a"))
        assert call.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenants_limit_counts_its_requests_to_all_models(
    model: Path, tmp_path: Path
) -> None:
    keyring = FileKeyring(tmp_path / "keys")
    key = await keyring.add(TenantRecord("acme", requests_per_minute=2))
    async with serving(
        model,
        served_model_name="tiny",
        further=[FakeScheduler(model_name="large")],
        api_key_file=keyring.path,
    ) as running:
        headers = {"Authorization": f"Bearer {key}"}
        for name, status in (("tiny", 200), ("large", 200), ("large", 429), ("tiny", 429)):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            answer = await running.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status


async def test_the_page_of_each_model_links_to_the_others(two: Serving) -> None:
    async with chromium() as browser, page_of(browser, two.base_url, **WIDE) as page:
        for path, model, other in (
            ("/ui", "tiny", "/models/org/large/ui"),
            ("/models/org/large/ui", "org/large", "/models/tiny/ui"),
        ):
            await page.goto(f"{two.base_url}{path}")
            link = page.locator("#model a")
            await link.wait_for()
            assert (await page.locator("#model").inner_text()).startswith(model)
            assert await link.get_attribute("href") == other
