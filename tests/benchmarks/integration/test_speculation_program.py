"""What speculation gains and costs is measured, on a model that takes no time."""

from pathlib import Path

import pytest

from benchmarks.worker.speculation import loads, measure

DEMO = Path(__file__).parents[3] / "models" / "demo"


async def test_every_text_is_written_with_speculation_and_without() -> None:
    table = await measure(DEMO, num_threads=1, num_rounds=1, num_tokens=24)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [(row[0], int(row[1])) for row in rows[2:]] == [(of.name, num) for of, num in loads(1)]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[2:5])
    tokens_a_step = {(row[0], int(row[1])): float(row[5]) for row in rows[2:]}
    assert tokens_a_step["edit of a program", 1] > 2
    assert tokens_a_step["random tokens", 1] == pytest.approx(1, abs=0.1)
    assert all(tokens < 1.1 for (_, num), tokens in tokens_a_step.items() if num > 1)
