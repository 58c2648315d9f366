"""The programs in docs/http-api.md run unchanged against a server."""

import os
import re
import subprocess
import sys

import pytest

from tests.e2e.stack import ROOT, Stack

PROGRAMS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "http-api.md").read_text(), re.DOTALL
)
NAMES = ["responses", "messages", "sessions over HTTP", "sessions over gRPC"]


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_a_documented_program_runs(program: str, stack: Stack) -> None:
    for documented, here in (
        ("http://127.0.0.1:8000", stack.url),
        ("127.0.0.1:9000", stack.grpc),
        ('"demo"', repr(stack.model)),
    ):
        program = program.replace(documented, here)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
