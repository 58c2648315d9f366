"""Tests of a gateway after test_removed_option.py deleted the code of the option `sessions`."""

from pathlib import Path

import grpc
import pytest

from services.common.process.settings import SettingError, parse_settings
from services.gateway.settings import GatewaySettings
from tests.gateway.serving import Serving

BODY = {"prompt": "hello", "max_tokens": 2, "session": "sess-1"}


async def test_completions_have_no_session(served: Serving) -> None:
    assert (await served.http.post("/v1/sessions", json={})).status_code == 404
    answer = await served.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-stepwell-ignored-fields"] == "session"
    assert not served.scheduler.adds[0].resumable


async def test_the_call_is_not_served(served: Serving) -> None:
    call = served.stub.GenerateSession()
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_nothing_names_it(served: Serving, model: Path) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert "/v1/sessions" not in document["paths"]
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionBody")
    assert "stepwell_gateway_sessions" not in (await served.http.get("/metrics")).text
    flags = ["--model", str(model), "--max-client-sessions", "1"]
    with pytest.raises(SettingError, match="max-client-sessions"):
        parse_settings(GatewaySettings, "gateway", flags, {})
