"""The benchmark of sampling measures every kind of row, on a small vocabulary."""

import shutil

import pytest

from benchmarks.worker.sampling import KINDS, SPREADS
from tests.benchmarks.programs import run_program


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_every_kind_is_measured_in_numpy_and_compiled() -> None:
    flags = ("--vocabularies", 500, "--rows", 2, "--rounds", 1, "--steps", 1)
    done = run_program("worker.sampling", *flags)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "| 500" in line]
    assert [(row[1], int(row[2])) for row in rows] == [(k, s) for k in KINDS for s in SPREADS]
    assert all(float(figure) > 0 for row in rows for figure in row[3:])
