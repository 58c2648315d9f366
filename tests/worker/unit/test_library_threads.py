"""Libraries start no more threads than a worker needs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
import services.worker, os
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(os.environ["OMP_WAIT_POLICY"], os.environ["OPENBLAS_NUM_THREADS"])
"""


def variables(**environ: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "OPENBLAS_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=kept | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_threads_that_wait_sleep_unless_the_environment_says_otherwise() -> None:
    assert variables() == ["passive", "1"]
    assert variables(OMP_WAIT_POLICY="active", OPENBLAS_NUM_THREADS="2") == ["active", "2"]
