"""Tests of a gateway after test_removed_option.py deleted the code of the option `vllm_routes`."""

import pytest

from services.gateway.adapters.http.clients.client_routes import HEADERS
from tests.gateway.serving import Serving

PATHS = (
    *("/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling", "/inference/v1/generate"),
    *("/v1/completions/render", "/v1/chat/completions/derender"),
)


@pytest.mark.parametrize("path", PATHS)
async def test_its_paths_are_not_there(served: Serving, path: str) -> None:
    assert (await served.http.post(path, json={})).status_code == 404


async def test_the_other_routes_are_documented_and_answer(served: Serving) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert not document["paths"].keys() & set(PATHS)
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        assert path in document["paths"]
        assert (await served.http.post(path, json=body)).status_code == 200
    parameters = document["paths"]["/v1/completions"]["post"]["parameters"]
    assert {header.name for header in HEADERS} <= {one["name"] for one in parameters}
