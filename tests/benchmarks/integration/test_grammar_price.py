"""The benchmark of grammar-constrained rows runs, on a model whose computation takes no time."""

from pathlib import Path

from benchmarks.worker.grammar_price import build, table


def test_each_number_of_rows_is_measured(servable_model: Path) -> None:
    worker = build(servable_model, most_rows=4, num_steps=20)
    text = table(worker, (2, 4), num_rounds=1, num_steps=20)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [int(row[0]) for row in rows[2:]] == [2, 4]
    for row in rows[2:]:
        advance, mask = row[4].split(" + ")
        assert all(float(figure) > 0 for figure in (row[1], row[2], advance, mask))
        assert float(row[5]) > float(advance) + float(mask)
        assert row[7].endswith("%")
