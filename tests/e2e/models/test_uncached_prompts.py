"""Prompts of requests that must not read the prefix cache."""

import json
import re

from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from tests.e2e.inference import connect, generate
from tests.e2e.prompts import random_tokens
from tests.e2e.stack import ROOT, Stack
from tests.plain_http import http_client

DOCUMENT = ROOT / "docs" / "http-api.md"


def test_the_example_of_the_documentation_reads_no_cache(stack: Stack) -> None:
    [text] = re.findall(r"-d '(.*skip_reading_prefix_cache.*)'", DOCUMENT.read_text())
    body = json.loads(text) | {"temperature": 0}
    answers = []
    with http_client(base_url=stack.url) as client:
        for skips in (True, False, True):
            asked = body | {"skip_reading_prefix_cache": skips}
            answer = client.post("/v1/completions", json=asked).raise_for_status().json()
            answers.append(answer)
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0, "what the first one computed is cached for others"
    assert len({one["choices"][0]["text"] for one in answers}) == 1


async def test_a_prompt_is_computed_whole_where_asked_for_over_grpc(stack: Stack) -> None:
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=random_tokens(8_000, 50)),
        sampling=common_pb2.SamplingParams(max_tokens=2, temperature=0.0),
    )
    cached = []
    async with connect(stack.grpc) as stub:
        for skips in (False, False, True):
            request.skip_reading_prefix_cache = skips
            cached.append((await generate(stub, request)).num_cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
