"""The comparison of workers runs: ours beside transformers, on a model that takes no time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.random_model import Shape, write_model
from benchmarks.worker.loads import NAMES, PREFIX

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.worker", "--threads", "1", "--rounds", "1"]
TINY = Shape(64, 2, 1, 1, 128, 512, tied_embeddings=True)


@pytest.mark.slow
@pytest.mark.timeout(300)  # three processes that import torch: a busy machine takes its time
def test_every_load_is_measured_on_both_sides_in_turns(tmp_path: Path) -> None:
    model, figures = tmp_path / "tiny", tmp_path / "figures.json"
    write_model(TINY, model)
    done = subprocess.run(
        [*COMMAND, "--model", model, "--json", figures],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(figures.read_text())["models"][str(model)]
    ours, theirs = measured["rounds"].values()
    assert list(ours) == list(theirs) == list(NAMES)
    assert all(len(values) == 1 and values[0] > 0 for values in (*ours.values(), *theirs.values()))
    assert measured["lead"][PREFIX] == pytest.approx(theirs[PREFIX][0] / ours[PREFIX][0])
    assert measured["measured"]["best"]["flops"] > 0
    for load in NAMES:
        assert f"| {load} |" in done.stdout
    turns = [line for line in done.stderr.splitlines() if PREFIX in line]
    assert ["Stepwell" in turns[0], "transformers" in turns[1]] == [True, True]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "no/such"], "no/such is neither a model directory nor one of"),
        (["--baseline", "no/such"], "no/such is not a checkout with gen/ built"),
        (["--baseline", ".", "--vllm-python", sys.executable], "leaves no place for other engines"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
