"""vLLM's additional routes accept and return token ids."""

import json
from array import array
from typing import Any

import httpx
import pytest

from tests.gateway.documented import Documented
from tests.gateway.serving import Serving

GENERATE = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "seed": 1}},
}


async def post(served: Serving, **more: Any) -> httpx.Response:
    return await served.http.post(GENERATE, json={**BODIES[GENERATE], **more})


async def test_tokens_go_in_and_out_whole_and_streamed(served: Serving) -> None:
    whole = (await post(served)).json()
    sent = served.scheduler.adds[-1]
    assert array("i", sent.prompt_token_ids).tolist() == [5, 6]
    [choice] = whole["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")
    assert whole["usage"]["completion_tokens"] == 4
    stream = await post(served, stream=True, stream_options={"include_usage": True})
    *events, last, end = [line[6:] for line in stream.text.split("\n") if line.startswith("data: ")]
    pieces = [json.loads(event)["choices"][0] for event in events]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
    assert (json.loads(last)["usage"], end) == (whole["usage"], "[DONE]")


async def test_its_logprobs_are_by_token_ids_and_its_answers_as_documented(served: Serving) -> None:
    document = Documented((await served.http.get("/openapi.json")).json())
    for stream in (False, True):
        params = {"max_tokens": 3, "logprobs": 2, "n": 2, "top_k": -1}
        answer = await post(served, sampling_params=params, stream=stream)
        assert answer.status_code == 200, answer.text
        document.check(GENERATE, answer)
        if not stream:
            for choice in answer.json()["choices"]:
                entries = choice["logprobs"]["content"]
                assert [one["token_id"] for one in entries] == choice["token_ids"]
                assert all(len(one["top_logprobs"]) == 2 for one in entries)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 10**6]}, "token_ids"),
        ({"token_ids": "the"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"output_mode": "text"}, "output_mode"),
        ({"features": {}}, "features"),
    ],
)
async def test_what_is_wrong_is_named(served: Serving, more: dict[str, Any], field: str) -> None:
    answer = await post(served, **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_a_model_that_generates_says_so_to_those_who_ask_for_vectors(served: Serving) -> None:
    for path, body in BODIES.items():
        if path != GENERATE:
            error = (await served.http.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("other_runner", "model")
