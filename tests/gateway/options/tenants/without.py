"""Tests of a gateway after test_removed_option.py deleted the code of the option `tenants`."""

from pathlib import Path

import pytest
from stepwell.gateway.v1 import gateway_pb2

from services.common.process.settings import SettingError, parse_settings
from services.gateway.settings import GatewaySettings
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import BODY, Stream

KEY = {"Authorization": "Bearer k"}


@pytest.mark.parametrize("variable", ["API_KEYS", "API_KEY_FILE", "API_KEYS_IN_REDIS"])
def test_keys_in_the_environment_end_the_start(model: Path, variable: str) -> None:
    """If the gateway ignored the variable, it would serve everyone despite the configured keys."""
    environment = {f"STEPWELL_GATEWAY_{variable}": "true"}
    with pytest.raises(SettingError, match=variable):
        parse_settings(GatewaySettings, "gateway", ["--model", str(model)], environment)


async def test_every_client_is_served(served: Serving) -> None:
    for headers in ({}, KEY, {"X-Api-Key": "k"}):
        answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
    request = gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2})
    call = served.stub.Generate(request, metadata=(("authorization", "Bearer k"),))
    assert [response async for response in call]
    assert {add.cache_salt for add in served.scheduler.adds} == {""}


async def test_sequences_wait_at_the_scheduler(model: Path) -> None:
    scheduler = FakeScheduler(permits=0, max_num_seqs=1)
    async with serving(model, scheduler) as served:
        streams = [Stream(served) for _ in range(3)]
        await until(lambda: len(scheduler.adds) == 3)
        assert served.gateway.fleet.num_waiting == 0
        scheduler.run_freely()
        for stream in streams:
            await stream.task


async def test_operators_have_their_key(model: Path) -> None:
    settings = {"admin_address": "127.0.0.1:0", "admin_key": "operator"}
    async with serving(model, **settings) as served:
        for key, status in (("operator", 200), ("k", 401)):
            answer = await served.http.post(
                f"http://{served.admin_address}/resume", headers={"Authorization": f"Bearer {key}"}
            )
            assert answer.status_code == status


async def test_nothing_names_it(served: Serving) -> None:
    document = (await served.http.get("/openapi.json")).text
    assert "x-ratelimit" not in document
    assert "securitySchemes" not in document
    assert "stepwell_tenant" not in (await served.http.get("/metrics")).text
