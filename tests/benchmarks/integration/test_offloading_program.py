"""The benchmark of KV offloading to host memory runs, on a model whose steps take no time."""

import argparse
from pathlib import Path

import pytest

from benchmarks.worker.offloading import LOADS, measure, parse_options


def options(model: Path) -> argparse.Namespace:
    flags = ["--model", str(model), "--threads", "1", "--rounds", "1", "--gib", "0.01"]
    return parse_options([*flags, "--num-blocks", "200"])


async def test_first_tokens_and_new_prompts_are_measured(
    servable_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await measure(options(servable_model))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    first, second = rows[2:5], rows[7:]
    assert [row[0] for row in first] == [
        "computed",
        "loaded from the tier",
        "found in the prefix cache",
    ]
    assert all(float(figure) > 0 for row in first for figure in row[1:])
    assert [row[0] for row in second] == [load.name for load in LOADS]
    assert all(float(figure) > 0 for row in second for figure in row[1:3])
    assert all(price.endswith("%") for row in second for price in row[3:])
