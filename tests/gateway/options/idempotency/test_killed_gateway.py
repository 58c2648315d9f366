"""A gateway is killed during a stream, and the client's retry gets the same answer."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_post
from tests.redis_servers import needs_redis, redis_server

BODY = {"prompt": [7, 8, 9, 10], "temperature": 1.0, "ignore_eos": True, "max_tokens": 400}
KEY = {"Idempotency-Key": "mine"}


def ask(stack: Stack, *, key: bool, seed: int | None = None) -> dict[str, Any]:
    answer = http_post(
        f"{stack.url}/v1/completions",
        json=BODY | {"model": stack.model, "return_token_ids": True, "seed": seed},
        headers=KEY if key else {},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def stream_until_the_gateway_dies(stack: Stack) -> str:
    """Kills the gateway while it streams an answer. Returns the id of the answer."""
    body = BODY | {"model": stack.model, "stream": True, "seed": 21}
    name = ""
    with (
        suppress(httpx.TransportError),
        httpx.stream(
            "POST", f"{stack.url}/v1/completions", json=body, headers=KEY, timeout=60
        ) as stream,
    ):
        for number, line in enumerate(stream.iter_lines()):
            name = name or line.partition('"id":')[2].partition(",")[0].strip(' "')
            if number == 40:
                stack.hit("gateway")
        raise AssertionError("the stream came to its end")
    return name


@needs_redis
@pytest.mark.slow
def test_a_killed_gateways_stream_is_found_again(tmp_path: Path) -> None:
    save_servable_model(tmp_path / "tiny")
    with redis_server(tmp_path / "redis") as server:
        stack = Stack(tmp_path / "tiny", "--num-blocks", "200", "--redis-url", server.url)
        try:
            killed, name = stack.pids()["gateway"], stream_until_the_gateway_dies(stack)
            stack.wait_until_back("gateway", killed)
            again = ask(stack, key=True, seed=21)
            undisturbed = ask(stack, key=False, seed=21)
            assert again["choices"] == undisturbed["choices"]
            assert again["id"] == name
            assert again["usage"]["completion_tokens"] == 400
        finally:
            stack.close()
