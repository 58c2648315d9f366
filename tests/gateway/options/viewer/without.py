"""Tests of a gateway after test_removed_option.py deleted the code of the option `viewer`."""

from pathlib import Path

import pytest

from services.cli.processes.plan import Addresses, stages
from services.cli.settings import UpSettings
from services.common.process.settings import SettingError, parse_settings
from services.gateway.settings import GatewaySettings
from tests.gateway.serving import serving
from tests.gateway.spans import Tracer, assert_adds_up
from tests.plain_http import async_http_client


async def test_requests_are_answered_and_traced(model: Path) -> None:
    tracer = Tracer()
    async with serving(model, tracing=tracer.tracing, admin_address="127.0.0.1:0") as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
        assert (await served.http.post("/v1/completions", json={"n": 0})).status_code == 400
        assert_adds_up(await tracer.trace())
        (replica,) = (await served.http.get("/status")).json()["replicas"]
        assert replica["stats"]["num_steps"] == 7
        async with async_http_client(base_url=f"http://{served.admin_address}") as admin:
            assert (await admin.post("/pause?mode=keep")).status_code == 200
            for http in (served.http, admin):
                paths = (await http.get("/openapi.json")).json()["paths"]
                assert not [path for path in paths if path.startswith(("/activity", "/traces"))]
                for path in ("/activity", "/traces", "/ui", "/ui/main.js", "/"):
                    assert (await http.get(path)).status_code == 404


def test_its_settings_are_unknown(model: Path) -> None:
    for flag in ("--ui", "--trace-address", "--trace-linger-seconds"):
        with pytest.raises(SettingError, match=flag.removeprefix("--")):
            parse_settings(GatewaySettings, "gateway", ["--model", str(model), flag, "1"], {})


def test_stepwell_up_starts_it(model: Path, tmp_path: Path) -> None:
    """The other services export no spans, because the gateway cannot store them."""
    [(gateway,), schedulers, _] = [
        stage.specs
        for stage in stages(UpSettings(model), Addresses("127.0.0.1", 8000, 9000, tmp_path), {})
    ]
    parse_settings(GatewaySettings, "gateway", [], gateway.environ)
    assert not [name for name in schedulers[0].environ if "OTLP" in name]
