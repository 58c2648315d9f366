"""How long the policies `continuum-fixed` and `continuum-ttl` pin an agent's ended request."""

import math
from collections import deque
from statistics import correlation

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.policies.continuum.pin_times import (
    LEAST_PAUSES,
    FixedTimes,
    OptimalTimes,
    Pauses,
    best_time,
)
from services.scheduler.core.step_costs import StepCosts


def test_a_fixed_pin_takes_two_seconds_unless_its_tool_takes_longer_on_average() -> None:
    times = FixedTimes()
    assert times.seconds("never seen", 100) == 2.0
    for seconds in (1.0, 3.0):
        times.pauses.add("sed", seconds)
    assert times.seconds("sed", 100) == 2.0
    times.pauses.add("sed", 2.1)
    assert times.seconds("sed", 100) == 0.0
    assert times.seconds("grep", 100) == 2.0


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=30),
    st.floats(-10, 200),
)
def test_the_best_time_is_that_of_the_definition(pauses: list[float], benefit: float) -> None:
    def gain(time: float) -> float:
        return sum(one <= time for one in pauses) / len(pauses) * benefit - time

    best = best_time(deque(pauses), benefit)
    assert gain(best) == pytest.approx(max(map(gain, [0.0, *pauses])), abs=1e-9)


def test_of_equal_times_the_smallest_is_taken() -> None:
    # A pin of 1 s gains 4 s in half of the cases, so 2 s on average, and a pin of 3 s gains 4 s in
    # all cases. After the costs of 1 s and 3 s, both gain 1 s.
    assert best_time(deque([1.0, 3.0]), 4.0) == 1.0
    assert best_time(deque([1.0]), 1.0) == 0.0


def optimal() -> OptimalTimes:
    """Pin times for a model that computes 100 prompt tokens in a second."""
    costs = StepCosts()
    for number in range(1, 20):
        costs.observe(number, number, 1e-6)
        costs.observe(1, 1001, 1e-6 + 10)
    return OptimalTimes(costs, 1000)


def test_while_little_is_known_the_time_is_optimal_for_exponential_pauses() -> None:
    times = optimal()
    assert times.seconds("sed", 1000) == pytest.approx(math.log(10), rel=1e-3)
    assert times.seconds("sed", 90) == 0.0
    times.waited(4.0)
    times.waited(6.0)
    assert times.seconds("sed", 1000) == pytest.approx(math.log(15), rel=1e-3)


def test_a_tool_that_is_hardly_known_is_judged_by_all_pauses() -> None:
    times = optimal()
    for _ in range(LEAST_PAUSES):
        times.pauses.add("sed", 0.5)
    assert times.seconds("sed", 1000) == pytest.approx(math.log(10), rel=1e-3)
    times.pauses.add("make", 60.0)
    # A pin of half a second is long enough for all but one of 101 pauses.
    assert times.seconds("sed", 1000) == times.seconds("make", 1000) == 0.5
    for _ in range(LEAST_PAUSES):
        times.pauses.add("make", 60.0)
    assert times.seconds("make", 1000) == 0.0


def test_waits_count_as_far_as_the_order_of_programs_matters() -> None:
    times = optimal()
    for _ in range(LEAST_PAUSES + 1):
        times.pauses.add("make", 20.0)
    times.waited(30.0)
    assert times.regularity() == 1.0
    assert times.seconds("make", 10) == 20.0
    for number in range(400):
        times.program_ended(1 + number**2 // 100)
    assert 0.3 < times.regularity() < 0.6
    assert times.seconds("make", 10) == 0.0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_the_regularity_is_minus_the_correlation(num_turns: list[int]) -> None:
    times = OptimalTimes(StepCosts(), 100)
    for number in num_turns:
        times.program_ended(number)
    served = [float(k) for n in num_turns for k in range(1, n + 1)]
    left = [float(n - k) for n in num_turns for k in range(1, n + 1)]
    if len(set(served)) > 1:
        assert times.regularity() == pytest.approx(-correlation(served, left), abs=1e-9)
    else:
        assert times.regularity() == 1.0


def test_programs_of_one_length_are_regular() -> None:
    times = OptimalTimes(StepCosts(), 100)
    for _ in range(10):
        times.program_ended(7)
    assert times.regularity() == pytest.approx(1.0)


def test_what_is_remembered_is_bounded() -> None:
    pauses = Pauses()
    for number in range(1000):
        pauses.add(f"tool {number}", 1.0)
        pauses.add("sed", 1.0)
    assert len(pauses.all) == len(pauses.of("sed")) == 400
    assert len(pauses._of_tool) == 256
    assert not pauses.of("tool 0")
