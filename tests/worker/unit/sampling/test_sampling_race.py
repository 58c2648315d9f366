"""The race of exponential variates by which tokens are sampled, compared with a reference, and the
distribution of its draws.
"""

import numpy as np
import pytest

from services.worker.sampling.philox import random_states
from services.worker.sampling.race import Race, exponentials, words
from tests.worker.race_reference import exponential_of


def states_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return random_states(seeds.astype(np.uint64), positions.astype(np.int64), stream=0)


def drawn(logits: np.ndarray, states: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The token drawn with each state [n, 2] from the logits [V], or with state i from row i."""
    logits = np.broadcast_to(logits, (len(states), logits.shape[-1]))
    race = Race(len(states), logits.shape[1])
    found: list[int] = []
    for start in range(0, len(states), race.capacity):
        rows = range(start, min(start + race.capacity, len(states)))
        for row in rows:
            np.copyto(race.next_row, logits[row])
            race.enter(logits[row].max(), np.float32(temperature), states[row])
        found += race.run().tolist()
    return np.array(found)


def exponentials_of(states: np.ndarray, vocab_size: int) -> np.ndarray:
    """The exponential variates of all tokens for each state, [n, V], without skipping blocks."""
    ids = np.arange(vocab_size)
    blocks, places = ids // 4096 * 128 + ids % 128, ids % 4096 // 128
    random = words(states[:, :1], blocks.astype(np.uint64))
    further = exponentials(words(states[:, 1:], ids.astype(np.uint64)))
    return exponentials(random) / 32 + np.where(random % np.uint64(32) == places, 0, further)


def test_words_are_those_of_published_split_mix_64() -> None:
    """The expected words are the published first outputs for the seed 1234567."""
    assert words(np.uint64(1234567), np.arange(1, 6, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_extreme_words_map_to_finite_numbers() -> None:
    slowest, fastest = exponentials(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist()
    assert 36 < slowest < 37
    assert 0 < fastest < 2e-16


def test_exponentials_are_those_of_the_reference() -> None:
    seed, position = 2**63 + 5, 77
    states = states_of(np.array([seed], dtype=np.uint64), np.array([position]))
    found = exponentials_of(states, 9000)[0]
    for token_id in (*range(300), 4095, 4096, 4097, 8999):
        assert found[token_id] == pytest.approx(exponential_of(seed, position, token_id), rel=1e-12)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 4096, 5000, 33_000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_skipping_blocks_changes_no_draw(vocab_size: int, spread: float) -> None:
    """Temperatures are high and low. In some rows, up to all tokens but one are banned."""
    generator = np.random.default_rng(vocab_size)
    logits = (generator.standard_normal((60, vocab_size)) * spread).astype(np.float32)
    logits[20:40][generator.random((20, vocab_size)) < 0.9] = -np.inf
    logits[40:50] = -np.inf
    logits[np.arange(60), generator.integers(vocab_size, size=60)] = 1.0
    states = states_of(np.arange(60), np.arange(60) * 2**33)
    for temperature in (0.01, 1.0, 3.0):
        weights = (logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature)
        with np.errstate(over="ignore"):
            times = exponentials_of(states, vocab_size) * np.exp(-weights.astype(np.float64))
        found = drawn(logits, states, temperature)
        np.testing.assert_array_equal(found, times.argmin(axis=1))
        np.testing.assert_array_equal(found[40:50], logits[40:50].argmax(axis=1))


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_exponentials_are_independent_exponentials(varied: str) -> None:
    """Varies the token, the seed or the position. The variates must be independent."""
    rising, fixed = np.arange(200), np.full(200, 3)
    states = states_of(*((rising, fixed) if varied == "seed" else (fixed, rising)))
    found = exponentials_of(states, 8192)
    uniform = np.exp(-found)
    counts = np.histogram(uniform, bins=64, range=(0, 1))[0]
    expected = found.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 130  # once in a million by chance
    limit = 5 / found.size**0.5
    for distance in (1, 2, 128, 256, 4096):
        assert (
            abs(np.corrcoef(uniform[:, distance:].ravel(), uniform[:, :-distance].ravel())[0, 1])
            < 1.5 * limit
        )
    for distance in (1, 2, 64):
        assert (
            abs(np.corrcoef(uniform[distance:].ravel(), uniform[:-distance].ravel())[0, 1])
            < 1.5 * limit
        )


@pytest.mark.parametrize("size", [6, 300, 6000])
def test_tokens_come_as_often_as_their_probabilities_say(size: int) -> None:
    """A few tokens have most of the probability. Rare tokens are counted together."""
    generator = np.random.default_rng(size)
    logits = (generator.standard_normal(size) * 3).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum()
    count = 20_000
    found = np.bincount(
        drawn(logits, states_of(np.full(count, 9), np.arange(count))), minlength=size
    )
    expected = count * probabilities
    often = expected >= 10
    found = np.append(found[often], found[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 15


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    """The expected frequency of a pair of tokens is the product of their probabilities."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    expected = 10_000 * np.outer(np.exp(logits), np.exp(logits))
    for seeds, positions in (
        (np.arange(20_000), np.zeros(20_000)),
        (np.zeros(20_000), np.arange(20_000)),
    ):
        pairs = drawn(logits, states_of(seeds, positions)).reshape(-1, 2)
        found = np.zeros((4, 4))
        np.add.at(found, (pairs[:, 0], pairs[:, 1]), 1)
        # With 15 degrees of freedom, chance exceeds this once in a million.
        assert ((found - expected) ** 2 / expected).sum() < 56


def test_a_small_change_of_logits_hardly_ever_changes_a_draw() -> None:
    """The logits of half of the tokens grow by 1e-5, and all others shrink by 1e-5. A draw changes
    only if the first two tokens of the race differ by so little.
    """
    generator = np.random.default_rng(5)
    logits = generator.standard_normal(1000).astype(np.float32) + np.float32(8)
    changed = logits + np.where(np.arange(1000) < 500, 1e-5, -1e-5).astype(np.float32)
    states = states_of(generator.integers(2**63, size=20_000), np.arange(20_000))
    num_changed = (drawn(logits, states) != drawn(changed, states)).sum()
    assert num_changed <= 3


def test_banning_a_token_changes_only_the_draws_of_that_token() -> None:
    logits = np.random.default_rng(8).standard_normal(500).astype(np.float32)
    states = states_of(np.arange(2000), np.zeros(2000))
    before = drawn(logits, states)
    banned = int(np.bincount(before).argmax())
    logits[banned] = -np.inf
    after = drawn(logits, states)
    others = before != banned
    assert 0 < others.sum() < 2000
    np.testing.assert_array_equal(after[others], before[others])
    assert (after != banned).all()
