"""Dynamo's own indexer of KV events reads the events of a scheduler. The environment variable
DYNAMO_PYTHON names an interpreter with the package ai-dynamo-runtime, which the tests' dependencies
lack.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from services.cli.processes.ports import claim_port
from tests.e2e.conftest import TinyModel
from tests.e2e.stack import Stack, wait_for
from tests.plain_http import http_get

PYTHON = os.environ.get("DYNAMO_PYTHON")
if PYTHON is None:
    pytest.skip("DYNAMO_PYTHON names no interpreter with Dynamo", allow_module_level=True)

BLOCK_SIZE = 16
PROMPT = [3 + token % 200 for token in range(100)]


@contextmanager
def indexer() -> Iterator[str]:
    """Runs an indexer that is not connected to an engine, and yields its URL."""
    port = claim_port("127.0.0.1", 0, "--port")
    code = f"import dynamo._core as core; core.run_kv_indexer(['--port', '{port}'])"
    process = subprocess.Popen([str(PYTHON), "-c", code])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: is_healthy(url))
        yield url
    finally:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        return http_get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def test_it_finds_what_is_cached_and_recovers_what_it_missed(tiny_model: TinyModel) -> None:
    live, replay = (claim_port("127.0.0.1", 0, "--port") for _ in range(2))
    flags = (
        *("--num-blocks", "1000", "--block-size", str(BLOCK_SIZE)),
        *("--kv-events-endpoint", f"tcp://*:{live}"),
        *("--kv-events-replay-endpoint", f"tcp://*:{replay}"),
    )
    stack = Stack(tiny_model.directory, *flags)
    try:
        with indexer() as url, httpx.Client(verify=False, timeout=60) as http:

            def complete(prompt: list[int]) -> None:
                body = {"model": stack.model, "prompt": prompt, "max_tokens": 1}
                http.post(f"{stack.url}/v1/completions", json=body).raise_for_status()

            def matched(prompt: list[int]) -> int:
                body = {"token_ids": prompt, "model_name": stack.model}
                scores = http.post(f"{url}/query", json=body).raise_for_status().json()["scores"]
                return int(scores.get("7", {}).get("0", 0))

            complete(PROMPT)
            engine = {
                "instance_id": 7,
                "endpoint": f"tcp://127.0.0.1:{live}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
                "model_name": stack.model,
                "block_size": BLOCK_SIZE,
            }
            http.post(f"{url}/register", json=engine).raise_for_status()
            rounds = iter(range(1000))

            def knows_all() -> bool:
                """Whether the indexer has all blocks. Sends a request first, because it notices
                missing events only when new ones arrive.
                """
                later = [next(rounds) % 200 + 3, *PROMPT]
                complete(later)
                return matched(PROMPT) == 96

            wait_for(knows_all)
            assert matched([token + 20 for token in PROMPT]) == 0
    finally:
        stack.close()
