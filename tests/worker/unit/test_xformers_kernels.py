"""Runs the tests of xFormers' kernels in separate processes, at most one for each processor.
tests/worker/interpreted runs the kernels on the CPU, and tests/worker/compiled compiles them for
GPUs. Separate processes are needed because Triton selects its interpreter when it is first
imported.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

WORKER_TESTS = Path(__file__).parents[1]
INTERPRETED, COMPILED = {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}
RUNS = {"interpreted": INTERPRETED, "compiled": COMPILED}
"""Maps each test directory, the slowest first, to its environment variables."""
SECONDS = 600
"""The time limit of a directory in seconds. The interpreter takes less than a minute, or several
minutes on a busy machine.
"""

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Done]]]:
    """Runs the tests of the selected directories. Maps each directory to its result."""
    pytest.importorskip("xformers", reason="xFormers has wheels for Linux on x86-64 alone")
    here = [item for item in request.session.items if item.path == request.path]
    selected = [
        item.callspec.params["directory"] for item in here if isinstance(item, pytest.Function)
    ]
    cache = tmp_path_factory.mktemp("triton")
    processors = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(1, processors)) as pool:
        yield {name: pool.submit(run_apart, name, cache) for name in RUNS if name in selected}
        pool.shutdown(cancel_futures=True)


def run_apart(directory: str, cache: Path) -> Done:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--timeout", str(SECONDS), WORKER_TESTS / directory),
        ],
        env=os.environ
        | {"XFORMERS_ENABLE_TRITON": "1", "TRITON_CACHE_DIR": str(cache)}
        | RUNS[directory],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("directory", RUNS)
def test_kernels_pass_their_own_tests(directory: str, runs: dict[str, Future[Done]]) -> None:
    done = runs[directory].result()
    assert done.returncode == 0, done.stdout + done.stderr
