"""The gateway's index of the pool's cached blocks, with Redis, and after the loss of Redis."""

import re

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.stack import Stack, wait_for
from tests.plain_http import http_get, http_post
from tests.redis_servers import free_port, needs_redis, redis_server

POOL_METRICS = f"127.0.0.1:{free_port()}"
ENVIRON = {"STEPWELL_KVPOOL_METRICS_ADDRESS": POOL_METRICS}
FLAGS = ("--num-blocks", "200", "--block-size", "4")


def metric(stack: Stack, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", http_get(f"{stack.url}/metrics").text, re.M)
    assert found is not None, name
    return float(found[1])


def state(stack: Stack) -> str:
    text = http_get(f"{stack.url}/metrics").text
    (name,) = re.findall(r'^stepwell_prefix_index_state\{state="(\w+)"\} 1\.0$', text, re.M)
    return str(name)


def complete(stack: Stack, prompt: str) -> None:
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer = http_post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def agrees(stack: Stack) -> bool:
    """Whether the index has as many blocks as the pool reports."""
    pool = http_get(f"http://{POOL_METRICS}/metrics").text
    found = re.search(r"^stepwell_kvpool_cached_hashes\{.*\} (\S+)$", pool, re.M)
    cached = 0.0 if found is None else float(found[1])
    return cached > 0 and metric(stack, "stepwell_prefix_index_keys") == cached


def is_right_after_a_request(stack: Stack) -> bool:
    complete(stack, "one two three four five six")
    return state(stack) == "exact" and agrees(stack)


@needs_redis
@pytest.mark.slow
def test_requests_go_on_while_redis_is_lost_and_the_index_is_right_again(
    tiny_model: TinyModel, tmp_path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        stack = Stack(tiny_model.directory, *FLAGS, "--redis-url", server.url, environ=ENVIRON)
        try:
            complete(stack, "one two three four five six")
            wait_for(lambda: state(stack) == "exact" and agrees(stack))
            server.kill()
            complete(stack, "seven eight nine ten eleven")
            wait_for(lambda: state(stack) == "fallback")
            complete(stack, "twelve thirteen fourteen")
            server.start()
            wait_for(lambda: state(stack) == "exact" and agrees(stack))
            server.stop()
            complete(stack, "fifteen sixteen seventeen")
            wait_for(lambda: state(stack) != "exact")
            server.go_on()
            wait_for(lambda: state(stack) == "exact" and agrees(stack))
            killed = stack.pids()["kvpool"]
            stack.hit("kvpool")
            stack.wait_until_back("kvpool", killed)
            # A new pool may lack a request that was served while the old one was killed.
            wait_for(lambda: is_right_after_a_request(stack))
        finally:
            stack.close()
            print(*stack.output, sep="\n")
