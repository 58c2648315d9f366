"""The benchmark of services that are left alone: all of it, for two seconds."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.tiny import save_servable_model

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.soak", "idle"]


def test_services_that_are_left_alone_keep_their_cache(tmp_path: Path) -> None:
    save_servable_model(tmp_path)
    done = subprocess.run(
        [*COMMAND, "--minutes", "0.03", "--model", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same answer; 0 warnings" in done.stdout


def test_no_time_at_all_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "--minutes", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "argument --minutes: must be above 0" in done.stderr
