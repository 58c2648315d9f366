"""Sampling filters, compared with transformers' logits processors and with plain arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.worker.sampling.filters import Filters, best_token_ids, kept_token_ids


def random_logits(seed: int, vocab_size: int, spread: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


def kept(logits: np.ndarray, **filters: float) -> list[int]:
    made = Filters(**filters)  # type: ignore[arg-type]
    token_ids = kept_token_ids(logits, logits.max(), np.float32(1), made)
    return list(range(len(logits))) if token_ids is None else token_ids.tolist()


def kept_by(logits: np.ndarray, *warpers: object) -> list[int]:
    scores = torch.from_numpy(logits)[None]
    for warper in warpers:
        scores = warper(None, scores)
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([2, 50, 257, 1000]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    top_k=st.integers(1, 1200),
    top_p=st.floats(0.01, 0.99),
    min_p=st.floats(0.001, 0.99),
)
def test_each_filter_keeps_what_transformers_keeps(
    seed: int, vocab_size: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed, vocab_size, spread)
    assert kept(logits, top_k=top_k) == kept_by(logits, TopKLogitsWarper(top_k))
    assert kept(logits, min_p=min_p) == kept_by(logits, MinPLogitsWarper(min_p))
    assert kept(logits, top_p=top_p) == kept_by(logits, TopPLogitsWarper(top_p))
    together = kept(logits, min_p=min_p, top_k=top_k, top_p=top_p)
    warpers = MinPLogitsWarper(min_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)
    assert together == kept_by(logits, *warpers)


def test_without_filters_every_token_stays() -> None:
    logits = random_logits(0, 10, 1.0)
    assert kept_token_ids(logits, logits.max(), np.float32(1), Filters()) is None
    assert kept(logits, top_k=10) == list(range(10))


def test_among_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, -0.0, 0.0], dtype=np.float32)
    assert kept(logits, top_k=1) == [1]
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_k=4) == [1, 2, 3, 4]
    assert kept(logits, top_k=7) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.2, [0]),
        (0.25, [0]),
        (0.26, [0, 1]),
        (0.5, [0, 1]),
        (0.75, [0, 1, 2]),
        (0.8, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_token_that_reaches_the_mass(top_p: float, expected: list[int]) -> None:
    assert kept(np.zeros(4, dtype=np.float32), top_p=top_p) == expected


def test_top_p_counts_mass_among_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]


def test_the_tiniest_top_p_keeps_one_token() -> None:
    assert kept(random_logits(3, 5000, 0.001), top_p=1e-30) == [
        int(random_logits(3, 5000, 0.001).argmax())
    ]


def test_banned_tokens_stay_out() -> None:
    logits = np.array([0, -np.inf, 0, -np.inf], dtype=np.float32)
    assert kept(logits, top_p=0.99) == [0, 2]
    assert kept(logits, min_p=0.01) == [0, 2]


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), levels=st.integers(1, 50))
def test_best_tokens_are_those_a_stable_sort_puts_first(seed: int, count: int, levels: int) -> None:
    logits = np.random.default_rng(seed).integers(0, levels, 30).astype(np.float32)
    expected = np.argsort(-logits, kind="stable")[:count]
    np.testing.assert_array_equal(best_token_ids(logits, count), np.sort(expected))
