"""Each HTTP answer contains the id of its request, which the client or the gateway chooses."""

import re
from pathlib import Path

import pytest

from tests.gateway.serving import serving

ASK = {"prompt": "a", "max_tokens": 2}
NEW = re.compile(r"[0-9a-f]{24}")


async def test_a_clients_name_stands_in_the_answer_and_goes_to_the_scheduler(model: Path) -> None:
    async with serving(model) as served:
        headers = {"X-Request-Id": "trace-7"}
        answer = await served.http.post("/v1/completions", json=ASK, headers=headers)
        assert answer.headers["x-request-id"] == "trace-7"
        (add,) = served.scheduler.adds
        assert answer.json()["id"] == add.request_id == "cmpl-trace-7"


async def test_the_name_in_a_body_comes_before_the_one_in_the_header(model: Path) -> None:
    async with serving(model) as served:
        ask = {**ASK, "request_id": "mine", "stream": True}
        headers = {"X-Request-Id": "trace-7"}
        answer = await served.http.post("/v1/completions", json=ask, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert '"id": "cmpl-mine"' in answer.text or '"id":"cmpl-mine"' in answer.text


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "t\u00e4g"])
async def test_a_header_that_is_no_name_is_replaced(model: Path, given: str) -> None:
    async with serving(model) as served:
        headers = {b"X-Request-Id": given.encode("latin-1")}
        answer = await served.http.post("/v1/completions", json=ASK, headers=headers)
        name = answer.headers["x-request-id"]
        assert NEW.fullmatch(name)
        assert answer.json()["id"] == f"cmpl-{name}"


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/nowhere", 404)]
)
async def test_every_answer_has_a_name(model: Path, path: str, status: int) -> None:
    async with serving(model) as served:
        first, second = await served.http.get(path), await served.http.get(path)
        assert first.status_code == status
        assert NEW.fullmatch(first.headers["x-request-id"])
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_refusals_have_one_too(model: Path) -> None:
    async with serving(model) as served:
        headers = {"X-Request-Id": "trace-7"}
        bad = await served.http.post("/v1/completions", json={"prompt": 1}, headers=headers)
        assert (bad.status_code, bad.headers["x-request-id"]) == (400, "trace-7")
        headers["Host"] = "evil.example"
        elsewhere = await served.http.get("/health", headers=headers)
        assert (elsewhere.status_code, elsewhere.headers["x-request-id"]) == (421, "trace-7")
