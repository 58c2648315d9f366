"""Tests that test_removed_option.py runs in a copy of the tree without the option `idempotency`."""

from pathlib import Path

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from services.common.process.settings import SettingError, parse_settings
from services.gateway.settings import GatewaySettings
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import BODY, Stream

KEY = {"Idempotency-Key": "k"}


async def test_the_header_has_no_effect(served: Serving) -> None:
    body = BODY | {"stream": False, "max_tokens": 3}
    for headers, fields in (
        (KEY, {}),
        (KEY, {}),
        (KEY, {"seed": 9}),
        ({"Idempotency-Key": ""}, {}),
    ):
        answer = await served.http.post("/v1/completions", json=body | fields, headers=headers)
        assert answer.status_code == 200, answer.text
    prompt = common_pb2.TokenIds(ids=[5, 6, 7])
    request = gateway_pb2.GenerateRequest(token_ids=prompt, sampling={"max_tokens": 2})
    async for _ in served.stub.Generate(request, metadata=(("idempotency-key", "k"),)):
        pass
    assert len({add.request_id for add in served.scheduler.adds}) == 5


async def test_a_client_that_goes_away_ends_its_request(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0)) as served:
        stream = Stream(served, headers=KEY)
        await until(lambda: served.scheduler.num_running == 1)
        stream.task.cancel()
        await until(lambda: served.scheduler.num_running == 0)


async def test_nothing_names_it(served: Serving, model: Path) -> None:
    for path in ("/openapi.json", "/metrics"):
        text = (await served.http.get(path)).text
        assert "idempoten" not in text.lower()
        assert '"422"' not in text
    flags = ["--model", str(model), "--idempotency-max-detached", "1"]
    with pytest.raises(SettingError, match="idempotency-max-detached"):
        parse_settings(GatewaySettings, "gateway", flags, {})
