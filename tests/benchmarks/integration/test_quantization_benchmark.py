"""The benchmark of quantized weights runs, on a model whose computation takes no time."""

import itertools
from pathlib import Path

from benchmarks.worker.quantization import LOADS, PROMPT, build_timers, table


def test_every_load_is_measured_with_each_kind_of_weights(random_model: Path) -> None:
    timers = build_timers(random_model, num_steps=3, num_threads=1)
    loads = (*LOADS, PROMPT)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table(timers, 1, loads).splitlines()
    ]
    kinds = ["stored", "int8", "w8a8", "int4"]
    assert [row[:2] for row in rows[2:]] == [[load.name, kind] for load in loads for kind in kinds]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[2:])


def test_steps_are_timed_with_the_clock_given(random_model: Path) -> None:
    """The clock advances by one second at each reading."""
    timers = build_timers(random_model, 2, 1, itertools.count().__next__)
    assert [timer.turn(PROMPT) for timer in timers.values()] == [1000] * len(timers)
