"""Exponentials and logarithms, compared with the C library's results in higher precision."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sampling.exact_math import exponential, logarithm


@given(st.lists(st.floats(-87, 0, width=32), min_size=1, max_size=50))
def test_exponentials_are_within_three_units_in_the_last_place(powers: list[float]) -> None:
    x = np.array(powers, np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (abs(exponential(x) - expected) <= 3 * np.spacing(expected.astype(np.float32))).all()


def test_exponentials_at_the_ends_of_their_range() -> None:
    x = np.array([0.0, -0.0, -1e-45, -87.5, -1e38, -np.inf], np.float32)
    assert exponential(x).tolist() == [1, 1, 1, 0, 0, 0]


@given(st.lists(st.floats(2.0**-60, 40), min_size=1, max_size=50))
def test_logarithms_are_within_two_units_in_the_last_place(numbers: list[float]) -> None:
    found = logarithm(np.array(numbers))
    for number, value in zip(numbers, found.tolist(), strict=True):
        assert abs(value - math.log(number)) <= 2 * math.ulp(math.log(number))


def test_logarithms_next_to_one_are_as_exact() -> None:
    numbers = [math.nextafter(1, 0), math.nextafter(1, 2)]
    found = logarithm(np.array([1.0, *numbers])).tolist()
    assert found[0] == 0
    assert found[1:] == pytest.approx([math.log(number) for number in numbers], rel=1e-15)
