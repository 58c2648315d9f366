"""Estimates from the times of steps how many seconds a prompt token and a decoding request add."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.step_costs import (
    MIN_COMPUTED_TOKENS,
    MIN_PROMPT_TOKENS,
    MIN_STEPS,
    RECENT_STEPS,
    StepCosts,
)

EACH_STEP, EACH_DECODE, EACH_TOKEN = 5e-3, 2e-4, 3e-5


def observe(costs: StepCosts, num_requests: int, num_prompt_tokens: int) -> None:
    seconds = EACH_STEP + EACH_DECODE * num_requests + EACH_TOKEN * num_prompt_tokens
    costs.observe(num_requests, num_requests + num_prompt_tokens, seconds)


def test_nothing_is_known_before_some_steps_of_each_kind() -> None:
    costs = StepCosts()
    for _ in range(MIN_STEPS - 1):
        observe(costs, 4, 0)
        observe(costs, 1, MIN_COMPUTED_TOKENS // MIN_STEPS)
    assert (costs.seconds_per_decode, costs.seconds_per_prompt_token) == (0.0, 0.0)
    assert costs.seconds_of_prompt(512, num_requests=8, token_budget=4096) == 0.0
    observe(costs, 1, MIN_COMPUTED_TOKENS)
    assert costs.seconds_per_prompt_token > 0.0, "one step tells as much as several short ones"


def test_steps_without_requests_tell_nothing() -> None:
    """Steps without requests only report transfers of keys and values."""
    costs = StepCosts()
    for _ in range(2 * MIN_STEPS):
        costs.observe(0, 0, 1e-3)
    assert costs.slowdown(1, 4) == 1.0
    for _ in range(MIN_STEPS):
        observe(costs, 4, 0)
    assert costs.seconds_per_decode == pytest.approx((EACH_STEP + 4 * EACH_DECODE) / 8)


@given(
    st.lists(st.integers(1, 256), min_size=MIN_STEPS, max_size=40).filter(
        lambda n: len(set(n)) > 1
    ),
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(MIN_PROMPT_TOKENS, 4096)),
        min_size=MIN_STEPS,
        max_size=40,
    ),
)
def test_steps_of_several_sizes_show_both(
    decoding: list[int], computing: list[tuple[int, int]]
) -> None:
    costs = StepCosts()
    for num_requests in decoding:
        observe(costs, num_requests, 0)
    for num_requests, num_prompt_tokens in computing:
        observe(costs, num_requests, num_prompt_tokens)
    assert costs.seconds_per_decode == pytest.approx(EACH_DECODE, rel=1e-6)
    assert costs.seconds_per_prompt_token == pytest.approx(EACH_TOKEN, rel=1e-6)
    step_of_prompts = EACH_STEP + 8 * EACH_DECODE + 4096 * EACH_TOKEN
    seconds = costs.seconds_of_prompt(512, num_requests=8, token_budget=4096)
    assert seconds == pytest.approx(step_of_prompts / 8, rel=1e-6)


def test_an_interrupted_step_has_little_influence() -> None:
    """Ten steps with prompts were observed, in one of which the pool did not reply for 0.7 s."""
    costs = StepCosts()
    for num_requests in range(1, 1 + MIN_STEPS):
        observe(costs, num_requests, 0)
    for _ in range(9):
        observe(costs, 1, 30)
    costs.observe(1, 31, 0.7)
    assert EACH_TOKEN < costs.seconds_per_prompt_token < 1.5 * EACH_TOKEN


def test_tokens_of_prompts_too_short_to_be_measured_count_as_much_as_decoded_ones() -> None:
    costs = StepCosts()
    for num_requests in range(1, 1 + MIN_STEPS):
        observe(costs, num_requests, 0)
        observe(costs, num_requests, MIN_PROMPT_TOKENS - 1)
    assert costs.seconds_per_prompt_token == 0.0
    seconds = costs.seconds_of_prompt(5, num_requests=8, token_budget=4096)
    step = EACH_STEP + 8 * EACH_DECODE
    assert seconds == pytest.approx(5 * (EACH_DECODE + step / 4096), rel=1e-6)


def test_steps_of_one_size_are_divided_in_halves() -> None:
    costs = StepCosts()
    for _ in range(MIN_STEPS):
        observe(costs, 10, 0)
    assert costs.seconds_per_decode == pytest.approx((EACH_STEP + 10 * EACH_DECODE) / 20)


def test_the_slowdown_is_how_much_longer_a_step_with_more_requests_takes() -> None:
    costs = StepCosts()
    assert costs.slowdown(8, 32) == 1.0, "nothing is known"
    for number in range(MIN_STEPS):
        observe(costs, 6 + number % 4, 0)
    expected = (EACH_STEP + 32 * EACH_DECODE) / (EACH_STEP + 8 * EACH_DECODE)
    assert costs.slowdown(8, 32) == pytest.approx(expected)
    assert costs.slowdown(32, 32) == 1.0


def test_a_step_that_took_less_with_more_requests_costs_nothing_for_each() -> None:
    costs = StepCosts()
    for number in range(MIN_STEPS):
        costs.observe(number + 1, number + 1, 1.0 - number / 100)
    assert costs.seconds_per_decode == 0.0


def test_costs_are_the_same_with_every_version_of_python() -> None:
    """`sum([0.1] * 10)` is 1.0 since Python 3.12, and 0.9999999999999999 in older versions."""
    costs = StepCosts()
    for _ in range(10):
        costs.observe(1, 17, 0.1)
    assert costs.seconds_per_prompt_token == 1.0 / 160


def test_the_fastest_load_tells_the_speed_of_loads() -> None:
    costs = StepCosts()
    assert costs.seconds_per_loaded_token == 0.0
    for num_tokens, seconds in ((32, 0.02), (3200, 0.16), (64, 0.5)):
        costs.observe_load(num_tokens, seconds)
    assert costs.seconds_per_loaded_token == pytest.approx(5e-5)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=MIN_STEPS, max_size=20),
    st.sampled_from([1e-4, 3e-3, 0.7]),
)
def test_no_cost_is_negative(steps: list[tuple[int, int]], each: float) -> None:
    """If the times of steps are proportional to their numbers of requests, the constant part of a
    step's cost is 0, or slightly negative by rounding. A negative cost would make a gain of the
    policy `program` negative.
    """
    costs = StepCosts()
    for num_requests, num_slow in steps:
        costs.observe(num_requests, num_requests, each * (num_requests + num_requests * num_slow))
    assert costs.seconds_per_step >= 0
    assert costs.seconds_per_decode >= 0
    assert costs.slowdown(1, 4) >= 1


def test_the_cost_of_a_prompt_token_is_computed_once_between_steps() -> None:
    """The policy `program` reads the cost for each of the contexts that it compares in a step."""

    class Counted(deque[tuple[int, int, float]]):
        num_read = 0

        def __iter__(self) -> Iterator[tuple[int, int, float]]:
            Counted.num_read += 1
            return super().__iter__()

    costs = StepCosts()
    costs._computing = Counted(maxlen=RECENT_STEPS)
    costs.observe(1, 1001, 2.0)
    assert {costs.seconds_per_prompt_token for _ in range(100)} == {0.002}
    assert Counted.num_read <= 2
    costs.observe(1, 1001, 4.0)
    assert costs.seconds_per_prompt_token == pytest.approx(0.003)
    for _ in range(MIN_STEPS):
        costs.observe(1, 1, 1.0)
    assert costs.seconds_per_prompt_token == pytest.approx(0.002)
