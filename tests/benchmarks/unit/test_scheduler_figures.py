"""The benchmark of planning steps: every kind of figure with the smallest size, and the table."""

import pytest

from benchmarks.scheduler import engine_stepwell
from benchmarks.scheduler.__main__ import table
from benchmarks.scheduler.loads import step_name


def test_every_kind_of_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stepwell, "SIZES", (16,))
    monkeypatch.setattr(engine_stepwell, "BLOCK_COUNTS", (1,))
    figures = engine_stepwell.measure()
    assert list(figures) == [
        step_name(16, async_scheduling=False),
        step_name(16, async_scheduling=True),
        "hash a prompt of 8192 tokens",
        "full hit of 8192 tokens: look-up and allocation",
        "get 1 blocks",
        "free 1 blocks",
        "get 1 cached blocks: eviction",
    ]
    assert min(figures.values()) > 0


def test_a_figure_that_the_other_lacks_is_a_dash() -> None:
    assert table({"a": 50.0, "b": 1.0}, {"a": 100.0}, "vLLM").splitlines()[2:] == [
        "| a | 50.0 | 100.0 | 0.500 |",
        "| b | 1.0 | — | — |",
    ]
