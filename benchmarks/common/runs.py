"""Runs a benchmark as a program: logs its errors, and writes its figures to a file."""

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from benchmarks.common.console import log, messages

T = TypeVar("T")


def run_program(running: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and returns its result. If it fails, its errors are logged and the process
    ends with status 1. SIGINT and SIGTERM end the process with status 130.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return uvloop.run(running)
    except* (RuntimeError, TimeoutError, httpx.HTTPError) as failed:
        log("\n".join(messages(failed)))
        sys.exit(1)
    except* KeyboardInterrupt:
        sys.exit(130)


def run_measurement(
    program: str,
    argv: Sequence[str],
    measure: Callable[[str], Coroutine[Any, Any, Any]],
    json_file: Path | None,
) -> None:
    """Runs `measure` for the program `benchmarks.PROGRAM`. Its argument is the program's command
    line. Writes the figures to `json_file`, if given.
    """
    begun = time.monotonic()
    results = run_program(measure(shlex.join(["python", "-m", f"benchmarks.{program}", *argv])))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")
    log(f"done after {time.monotonic() - begun:.0f} s")
