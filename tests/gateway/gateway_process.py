"""Runs the gateway as a process, and reads its log."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'gen'}"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "services.gateway", *flags]


@contextmanager
def process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    child = subprocess.Popen(command(*flags), env=environ, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        command(*flags), env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def serving_address(child: subprocess.Popen[str]) -> str:
    return line_with(child, "HTTP on ").partition("HTTP on ")[2].partition(",")[0]


def line_with(child: subprocess.Popen[str], text: str) -> str:
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return line
    raise AssertionError(f"the gateway ended before it said {text!r}")
