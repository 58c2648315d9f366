"""Runs a benchmark program as a user does."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(
    program: str, *arguments: object, timeout: float = 280, statuses: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m benchmarks.PROGRAM`. Its exit status must be one of `statuses`."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return done
