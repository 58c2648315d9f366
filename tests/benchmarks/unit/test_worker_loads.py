"""The loads that workers are compared by, and what a machine's limits allow."""

import pytest

from benchmarks.random_model import Shape
from benchmarks.report import worker_table
from benchmarks.worker import Limits
from benchmarks.worker_loads import NAMES, PREFILL, PREFIX, Loads, Prompts, decode_name


def test_every_load_is_run_once_a_round_and_once_before() -> None:
    seen: list[tuple[int, int, int]] = []

    def generate(prompts: Prompts, num_tokens: int) -> None:
        seen.append((len(prompts), len(prompts[0]), num_tokens))
        for _ in range(1000 * num_tokens):
            pass

    figures = Loads(generate, vocab_size=1000).figures(rounds=2)
    assert list(figures) == list(NAMES)
    assert all(len(values) == 2 and min(values) > 0 for values in figures.values())
    decodes = [(level, 128, count) for level in (1, 8, 32) for count in (1, 64)]
    assert seen == 3 * [(1, 512, 1), *decodes, (32, 416, 32)]


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    asked: list[Prompts] = []
    Loads(lambda prompts, _: asked.append(prompts), vocab_size=5000).prefix_seconds()
    [prompts] = asked
    assert len({tuple(prompt[:384]) for prompt in prompts}) == 1
    assert len({tuple(prompt[384:]) for prompt in prompts}) == 32


def test_limits_of_a_model_small_enough_to_count() -> None:
    """Layers of 2 x (4 of norms, 16 of attention, 48 of the MLP) weights, a tied head of 40."""
    shape = Shape(2, 2, 1, 1, 4, 20, tied_embeddings=True)
    layer = 2 * 2 + 4 * (2 * 2) + 3 * (2 * 4)
    figures = Limits(flops=1e6, bytes_per_second=1e6).figures(shape)
    assert figures[PREFILL] == pytest.approx(1e6 / (2 * 2 * layer))
    weights = 2 * layer + 40
    assert figures[decode_name(1)] == pytest.approx(1e6 / (2 * weights))
    assert figures[decode_name(32)] == pytest.approx(1e6 / (2 * weights))
    assert PREFIX not in figures


def test_a_table_of_engines() -> None:
    table = worker_table({"limit": {PREFILL: 1910.4}, "ours": {PREFILL: 1600.0, PREFIX: 1.234}})
    assert table.splitlines()[2:] == [f"| {PREFILL} | 1910 | 1600 |", f"| {PREFIX} | — | 1.23 |"]
