"""Runs tests of xFormers' kernels in processes of their own.

Whether Triton interprets is decided at its first import: tests/worker/interpreted run the kernels
on the CPU, tests/worker/compiled compile them for GPUs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER_TESTS = Path(__file__).parents[1]
SECONDS = 300
"""For a whole file: the interpreter takes half a minute, several beside busy neighbours."""


def run_apart(path: str, environment: dict[str, str]) -> None:
    """Runs the tests of a file with other variables; what they print, where they fail."""
    pytest.importorskip("xformers", reason="xFormers has wheels for Linux on x86-64 alone")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(WORKER_TESTS / path)],
        env=os.environ | {"XFORMERS_ENABLE_TRITON": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "name", ["test_paged_kernel.py", "test_cuda_path.py", "test_batch_invariant.py"]
)
def test_kernels_run_under_the_interpreter(name: str) -> None:
    run_apart(f"interpreted/{name}", {"TRITON_INTERPRET": "1"})


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run_apart("compiled/test_kernels_compile.py", environment)
