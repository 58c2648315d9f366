"""The benchmark of adapter costs runs, on a model whose computation takes no time."""

from pathlib import Path

from benchmarks.worker.adapter_price import LOADS, build, load_adapters, table
from benchmarks.worker.step_timer import StepTimer


def test_every_load_is_measured_with_each_number_of_adapters(
    servable_model: Path, tmp_path: Path
) -> None:
    worker = build(servable_model, rank=4, num_steps=3, num_threads=1)
    digests = load_adapters(worker, servable_model, tmp_path, rank=4)
    assert len(set(digests)) == len(digests)
    text = table(StepTimer(worker.runner, 3), digests, 1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    measured = [(row[0], int(row[1])) for row in rows[2:]]
    assert measured == [(load.name, number) for load, numbers in LOADS for number in numbers]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[2:4])
