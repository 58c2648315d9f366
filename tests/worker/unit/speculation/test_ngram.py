"""Drafts of n-grams, compared with a search through all tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.speculation.config import SpeculativeConfig
from services.worker.speculation.ngram import NgramIndex, NgramProposer


def searched(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Finds the longest suffix of `shortest` to `longest` tokens that has occurred before. Returns
    at most `most` tokens after the first occurrence of this suffix.
    """
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + most]
    return []


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
    most=st.integers(1, 5),
)
def test_the_index_equals_a_search_of_all_tokens(
    parts: list[list[int]], shortest: int, more: int, most: int
) -> None:
    index, tokens = NgramIndex(shortest, shortest + more), list[int]()
    for part in parts:
        index.extend(part)
        tokens += part
        assert list(index.follow(most)) == searched(tokens, shortest, shortest + more, most)


def test_a_row_with_a_new_request_starts_with_an_empty_index() -> None:
    proposer = NgramProposer(SpeculativeConfig(3, 1, 2))
    assert list(proposer.propose(0, np.array([5, 6, 7, 5], np.int32), 2)) == [6, 7]
    assert list(proposer.propose(1, np.array([5, 5], np.int32), 2)) == [5]
    proposer.forget(0)
    assert list(proposer.propose(0, np.array([8, 9], np.int32), 2)) == []
    proposer.clear()
    assert list(proposer.propose(1, np.array([8], np.int32), 2)) == []
