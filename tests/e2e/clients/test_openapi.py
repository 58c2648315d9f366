"""Runs schemathesis against the gateway's HTTP API, with all services and the demo model. No answer
may be a server error or missing from the OpenAPI document. `python -m benchmarks.soak openapi
--minutes 5` runs the same test for longer.
"""

import subprocess
from pathlib import Path

import pytest
import schemathesis

from benchmarks.soak.openapi import command, environment
from tests.e2e.stack import Stack
from tests.plain_http import http_get

SECONDS = 8


def test_no_answer_is_a_server_error_or_undocumented(demo_stack: Stack, tmp_path: Path) -> None:
    options = ("--phases", "coverage,fuzzing", "--max-time", str(SECONDS))
    done = subprocess.run(
        command(demo_stack.url, 1, *options),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Operations:       51 selected / 51 total" in done.stdout
    assert not [line for line in demo_stack.output if "defect" in line or "Traceback" in line]
    assert http_get(f"{demo_stack.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def f(", "n": 2, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_pass_every_check_of_schemathesis(
    demo_stack: Stack, path: str, body: dict[str, object], stream: bool
) -> None:
    """These requests are answered with text, unlike most of schemathesis' random requests."""
    schema = schemathesis.openapi.from_url(f"{demo_stack.url}/openapi.json")
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    case = schema[path]["POST"].Case(
        body={**body, most: 3, "stream": stream}, media_type="application/json"
    )
    response = case.call_and_validate()
    assert response.status_code == 200
    kind = "text/event-stream" if stream else "application/json"
    assert response.headers["content-type"] == [kind + ("; charset=utf-8" if stream else "")]
