"""The benchmark of sampling measures every kind of row, on a small vocabulary."""

import shutil

import pytest

from benchmarks.worker.sampling import KINDS, SPREADS, main


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_every_kind_is_measured_in_numpy_and_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--vocabularies 500 --rows 2 --rounds 1 --steps 1 --threads 1"
    monkeypatch.setattr("sys.argv", ["sampling", *flags.split()])
    main()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "| 500" in line]
    assert [(row[1], int(row[2])) for row in rows] == [(k, s) for k in KINDS for s in SPREADS]
    assert all(float(figure) > 0 for row in rows for figure in row[3:])
