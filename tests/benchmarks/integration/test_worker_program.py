"""The comparison of Stepwell's worker with transformers runs, on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks.worker.__main__ import main
from benchmarks.worker.loads import NAMES, PREFIX


@pytest.mark.slow
def test_every_load_is_measured_on_both_engines_in_turns(
    tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    flags = ("--threads", 1, "--rounds", 1, "--least-seconds", 0, "--model", random_model)
    main([*map(str, flags), "--json", str(figures)])
    output, progress = capsys.readouterr()
    measured = json.loads(figures.read_text())["models"][str(random_model)]
    ours, theirs = measured["rounds"].values()
    assert list(ours) == list(theirs) == list(NAMES)
    assert all(len(values) == 1 and values[0] > 0 for values in (*ours.values(), *theirs.values()))
    assert measured["lead"][PREFIX] == pytest.approx(theirs[PREFIX][0] / ours[PREFIX][0])
    assert measured["measured"]["best"]["flops"] > 0
    for load in NAMES:
        assert f"| {load} |" in output
    turns = [line for line in progress.splitlines() if PREFIX in line]
    assert ["Stepwell" in turns[0], "transformers" in turns[1]] == [True, True]
