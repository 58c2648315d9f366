"""Runs the tests of tests/worker/interpreted in a process whose Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parents[1] / "interpreted"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_paged_kernel.py", "test_cuda_path.py"])
def test_xformers_kernels_under_the_interpreter(name: str) -> None:
    pytest.importorskip("xformers", reason="xFormers has wheels for Linux on x86-64 alone")
    environment = os.environ | {"TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(INTERPRETED / name),
    ]
    done = subprocess.run(
        [*command, str(INTERPRETED / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
