"""The programs in docs/http-api.md run unchanged against a server."""

import re
from contextlib import closing, nullcontext
from typing import Any

import pytest

from tests.e2e.stack import ROOT, Stack

PROGRAMS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "http-api.md").read_text(), re.DOTALL
)
NAMES = ["responses", "messages", "sessions over HTTP", "sessions over gRPC"]


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_a_documented_program_runs(
    program: str, stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    for documented, here in (
        ("http://127.0.0.1:8000", stack.url),
        ("127.0.0.1:9000", stack.grpc),
        ('"demo"', repr(stack.model)),
    ):
        program = program.replace(documented, here)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "http-api.md", "exec"), names)
    with closing(names["client"]) if "client" in names else nullcontext():
        assert capsys.readouterr().out
