"""The random generator Philox, compared with published vectors, and its states."""

import numpy as np
import pytest

from services.worker.sampling.philox import philox4x32, random_states

# The rows "philox4x32 10" of kat_vectors in Random123, the implementation of Philox's authors:
# counter, key, expected words.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_published_vectors_one_at_a_time_and_together() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint32)
    keys = np.array([key for _, key, _ in KNOWN_ANSWERS], dtype=np.uint32)
    expected = np.array([words for _, _, words in KNOWN_ANSWERS], dtype=np.uint32)
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)
    for row in range(len(expected)):
        alone = philox4x32(counters[row : row + 1], keys[row : row + 1])
        np.testing.assert_array_equal(alone, expected[row : row + 1])


def test_the_words_of_a_state_are_the_generators_in_order() -> None:
    states = random_states(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), stream=0)
    assert states.tolist() == [[0xE169C58D6627E8D5, 0x9B00DBD8BC57AC4C]]


@pytest.mark.parametrize(
    ("seed", "position", "stream"), [(1, 0, 0), (2**63, 0, 0), (0, 1, 0), (0, 2**40, 0), (0, 0, 1)]
)
def test_seed_position_and_stream_each_change_both_words(
    seed: int, position: int, stream: int
) -> None:
    def state(seed: int, position: int, stream: int) -> np.ndarray:
        seeds, positions = np.array([seed], dtype=np.uint64), np.array([position], dtype=np.int64)
        return random_states(seeds, positions, stream)[0]

    assert (state(seed, position, stream) != state(0, 0, 0)).all()


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_words_spread_evenly_over_neighbouring_seeds_and_positions(varied: str) -> None:
    count, bins = 64_000, 64
    rising, fixed = np.arange(count), np.full(count, 7)
    seeds, positions = (rising, fixed) if varied == "seed" else (fixed, rising)
    states = random_states(seeds.astype(np.uint64), positions.astype(np.int64), stream=0)
    for words in states.T:
        found = np.bincount((words >> np.uint64(58)).astype(int), minlength=bins)
        expected = count / bins
        chi_square = ((found - expected) ** 2 / expected).sum()
        assert chi_square < 130  # exceeded by chance once in a million
        assert abs(np.corrcoef(words[:-1], words[1:])[0, 1]) < 0.02
