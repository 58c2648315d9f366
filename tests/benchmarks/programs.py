"""Runs a benchmark as a user does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(
    program: str, *arguments: object, timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.PROGRAM`, which must end with status 0; its output."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
