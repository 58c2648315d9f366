"""The benchmark of speculation runs, on a model whose computation takes no time."""

import itertools
from pathlib import Path

import pytest

from benchmarks.common.random_model import Shape, write_model
from benchmarks.worker.speculation import (
    NUM_DRAFTS,
    draft_model_loads,
    measure_draft_model,
    measure_repetition,
    repetition_loads,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the vocabulary of the texts."""
    directory = tmp_path_factory.mktemp("model")
    write_model(Shape(64, 2, 1, 1, 128, 4096, tied_embeddings=True), directory)
    return directory


def rows_of(table: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return rows[2:]


async def test_every_text_is_written_with_speculation_and_without(model: Path) -> None:
    table = await measure_repetition(model, num_threads=1, num_rounds=1, num_tokens=24)
    rows = rows_of(table)
    expected = [(load.text.name, load.num_at_once) for load in repetition_loads(1)]
    assert [(row[0], int(row[1])) for row in rows] == expected
    assert all(float(figure) > 0 for row in rows for figure in row[2:])
    for column in (5, 8):
        tokens_a_step = {(row[0], int(row[1])): float(row[column]) for row in rows}
        assert tokens_a_step["edit of a program", 1] > 1.5
        assert tokens_a_step["random tokens", 1] == pytest.approx(1, abs=0.1)
        assert all(tokens < 1.1 for (_, num), tokens in tokens_a_step.items() if num > 1)
    by_ngrams, by_suffixes = (float(rows[5][column]) for column in (5, 8))
    assert rows[5][0] == "step of an agent"
    assert by_suffixes > 1.3 * by_ngrams


async def test_one_text_is_timed_with_the_clock_given(model: Path) -> None:
    """The clock advances by one second at each reading. It is read once for each token and twice
    for each step of the model. Steps overlap, so two to four readings fall between two tokens.
    """
    clock = itertools.count().__next__
    table = await measure_repetition(model, 1, 1, 24, "random tokens", clock)
    ((name, *figures),) = rows_of(table)
    assert name == "random tokens"
    assert all(1500 < float(figures[column]) < 4500 for column in (1, 2, 5))


async def test_a_draft_model_gains_by_how_often_it_is_right(model: Path) -> None:
    rows = rows_of(await measure_draft_model(model, model, 1, num_rounds=1, num_tokens=48))
    expected = [(load.share_right, load.num_at_once) for load in draft_model_loads(1)]
    assert [(float(row[0]), int(row[1])) for row in rows] == expected
    alone = [float(row[5]) for row in rows if row[1] == "1"]
    assert alone == sorted(alone, reverse=True)
    assert 1 <= alone[-1] < 2
    assert 3 < alone[0] <= 1 + NUM_DRAFTS
    # The draft model is the target model itself, so their steps take similar times.
    assert all(0.3 < float(row[6]) < 3 for row in rows)
