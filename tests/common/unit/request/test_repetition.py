"""Repetition detection: a request ends when its output repeats a pattern too often."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.common.request.repetition import MAX_PATTERN_SIZE, RepetitionDetection


@pytest.mark.parametrize(
    ("tokens", "sizes", "min_count", "found"),
    [
        ([7, 7], (1, 1), 2, True),
        ([7], (1, 1), 2, False),
        ([7, 8], (1, 1), 2, False),
        ([7, 7, 8], (1, 1), 2, False),  # only a repetition at the end counts
        ([1, 7, 7, 7], (1, 1), 3, True),
        ([7, 7, 7], (1, 1), 4, False),
        ([1, 2, 1, 2], (2, 2), 2, True),
        ([1, 2, 1, 2, 1], (2, 2), 2, True),  # the pattern is 2, 1
        ([1, 2, 1], (2, 2), 2, False),
        ([1, 2, 1, 2], (1, 1), 2, False),
        ([1, 2, 1, 2], (3, 5), 2, False),
        ([1, 2, 3, 1, 2, 3], (1, 3), 2, True),
        ([1, 2, 3, 1, 2, 4], (1, 3), 2, False),
        ([7, 7, 7, 7], (2, 2), 2, True),  # the pattern 7, 7 occurs twice
        ([7, 7, 7], (2, 2), 2, False),
        ([1, 2, 3, 3, 2, 3], (3, 3), 2, False),
        ([9, *[4, 5] * 3], (1, 8), 3, True),
        ([9, *[4, 5] * 3], (1, 8), 4, False),
    ],
)
def test_a_pattern_is_found_where_it_ends_the_tokens_often_enough(
    tokens: list[int], sizes: tuple[int, int], min_count: int, found: bool
) -> None:
    shortest, longest = sizes
    repetition = RepetitionDetection(longest, shortest, min_count)
    assert repetition.found_at_end(tokens, 0) is found


def test_a_prompt_repeats_as_it_likes() -> None:
    repetition = RepetitionDetection(2, 1, 2)
    assert repetition.found_at_end([5, 5, 5, 5], 2)
    assert not repetition.found_at_end([5, 5, 5, 5], 3)
    assert not repetition.found_at_end([5, 5, 5, 5], 4)


@pytest.mark.parametrize("wrong", [0, 1, 99, 100, 150, 199, 250, 291, 292, 298, 299])
def test_one_wrong_token_anywhere_in_long_patterns_is_seen(wrong: int) -> None:
    output = [*range(100)] * 3
    repetition = RepetitionDetection(100, 100, 3)
    assert repetition.found_at_end(output, 0)
    output[wrong] = 777
    assert not repetition.found_at_end(output, 0)


@settings(max_examples=300)
@given(
    prompt=st.lists(st.integers(1, 2), max_size=4),
    output=st.lists(st.integers(1, 3), max_size=24),
    shortest=st.integers(1, 5),
    more=st.integers(0, 5),
    min_count=st.integers(2, 5),
)
def test_a_repetition_is_found_where_a_plain_comparison_finds_it(
    prompt: list[int], output: list[int], shortest: int, more: int, min_count: int
) -> None:
    written_out = any(
        len(output) >= size * min_count
        and output[-size * min_count :] == output[-size:] * min_count
        for size in range(shortest, shortest + more + 1)
    )
    repetition = RepetitionDetection(shortest + more, shortest, min_count)
    assert repetition.found_at_end(prompt + output, len(prompt)) is written_out


def test_zero_sizes_mean_no_detection_and_a_shortest_size_of_one() -> None:
    assert RepetitionDetection.of(0, 0, 0) is None
    assert RepetitionDetection.of(5, 0, 3) == RepetitionDetection(5, 1, 3)
    assert RepetitionDetection.of(5, 2, 3) == RepetitionDetection(5, 2, 3)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ((-1, 0, 2), "max_pattern_size"),
        ((MAX_PATTERN_SIZE + 1, 1, 2), "max_pattern_size"),
        ((0, 1, 2), "min_pattern_size"),
        ((3, 4, 2), "min_pattern_size"),
        ((3, -1, 2), "min_pattern_size"),
        ((3, 1, 1), "min_count"),
        ((3, 1, 0), "min_count"),
        ((3, 1, 2**31), "min_count"),
    ],
)
def test_what_describes_no_repetition_is_refused_by_name(
    said: tuple[int, int, int], field: str
) -> None:
    repetition = RepetitionDetection.of(*said)
    assert repetition is not None
    with pytest.raises(InvalidArgument) as refusal:
        repetition.validate()
    assert refusal.value.field == f"repetition_detection.{field}"
    assert refusal.value.message.startswith(f"repetition_detection.{field} is ")


def test_the_bounds_themselves_are_taken() -> None:
    RepetitionDetection(MAX_PATTERN_SIZE, MAX_PATTERN_SIZE, 2).validate()
    RepetitionDetection(1, 1, 2**31 - 1).validate()


@pytest.mark.parametrize(
    ("shortest", "min_count", "run"), [(300, 4, 890), (512, 2, 1023), (2, 100, 199)]
)
def test_a_run_that_is_too_short_is_compared_once_and_not_for_each_size(
    shortest: int, min_count: int, run: int
) -> None:
    class Counted(list[int]):
        num_compared = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Counted.num_compared += len(found) if isinstance(at, slice) else 1
            return found

    tokens = Counted([*[1, 2, 3, 4, 6] * 1000, *[5] * run])
    assert not RepetitionDetection(MAX_PATTERN_SIZE, shortest, min_count).found_at_end(tokens, 0)
    assert Counted.num_compared < 12 * MAX_PATTERN_SIZE
