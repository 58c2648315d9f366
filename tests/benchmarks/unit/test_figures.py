"""Latencies, throughput and confidence intervals of benchmarks, compared with hand computation."""

import math
from fractions import Fraction
from random import Random

import pytest

from benchmarks.common.figures import (
    Figures,
    figures_of,
    interleaved,
    median_figures,
    median_ratio,
    median_tpot_ratio,
    percentile,
    percentile_interval,
    percentile_ratio_interval,
)
from benchmarks.common.load import Load, RequestTimes

MS = 1_000_000


def request(sent: int, *arrivals: tuple[int, int]) -> RequestTimes:
    """A request whose times are given in milliseconds."""
    return RequestTimes(sent * MS, [(at * MS, count) for at, count in arrivals])


def figures(tokens_per_second: float, tpot_mean: float = 6) -> Figures:
    return Figures(1, 2, 3, 4, 5, tpot_mean, 7, tokens_per_second)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 102), 99) == 100
    assert percentile([7.0], 99) == 7
    assert percentile([3, 1, 2], 0) == 1
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(("num_values", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15))])
def test_an_interval_of_the_median_is_that_of_the_sign_test(
    num_values: int, ranks: tuple[int, int]
) -> None:
    """The expected ranks are from published tables of the sign test."""
    assert percentile_interval(range(1, num_values + 1), 50) == ranks


def test_an_interval_has_no_end_where_too_few_values_bound_it() -> None:
    assert percentile_interval(range(367), 99)[1] == math.inf
    assert percentile_interval(range(368), 99)[1] == 367
    assert percentile_interval([7.0], 50) == (0, math.inf)
    assert percentile_interval([], 99) == (0, math.inf)


def test_an_interval_is_the_narrowest_that_is_exact() -> None:
    """The probabilities are computed exactly, as fractions. If a bound were one rank closer to the
    percentile, the interval would miss the percentile too often.
    """
    num_values, part = 500, Fraction(99, 100)

    def at_most(num_below: int) -> Fraction:
        return sum(
            (
                math.comb(num_values, n) * part**n * (1 - part) ** (num_values - n)
                for n in range(num_below + 1)
            ),
            start=Fraction(0),
        )

    low, high = map(int, percentile_interval(range(1, num_values + 1), 99))
    tail = Fraction(1, 40)
    assert at_most(low - 1) <= tail < at_most(low)
    assert 1 - at_most(high - 1) <= tail < 1 - at_most(high - 2)


def test_most_intervals_have_the_percentile_in_them() -> None:
    draw = Random(0)
    percentile_of_all = -math.log(1 - 0.95)
    num_trials, num_found = 1000, 0
    for _ in range(num_trials):
        low, high = percentile_interval((draw.expovariate(1) for _ in range(200)), 95)
        num_found += low <= percentile_of_all <= high
    assert 0.95 <= num_found / num_trials <= 0.99


def test_a_ratio_of_percentiles_is_bounded_by_the_ends_of_both_intervals() -> None:
    these, those = range(1, 21), range(101, 121)
    assert percentile_interval(these, 50, 0.975) == (5, 16)
    assert percentile_ratio_interval(these, those, 50) == (5 / 116, 16 / 105)
    assert percentile_ratio_interval(these, [7.0], 50) == (0, math.inf)


def test_latencies_and_throughput_of_two_requests() -> None:
    found = figures_of(
        [
            request(1000, (1100, 1), (1110, 1), (1130, 1)),
            request(1000, (1200, 1), (1250, 1), (1500, 1)),
        ]
    )
    assert found.ttft_median == 150
    assert found.ttft_p99 == 200
    assert found.itl_median == (20 + 50) / 2
    assert found.itl_p99 == 250
    assert found.tpot_median == found.tpot_mean == (30 / 2 + 300 / 2) / 2
    assert found.e2e_median == (130 + 500) / 2
    assert found.tokens_per_second == 6 / 0.5


def test_tokens_that_come_together_share_the_wait() -> None:
    found = figures_of([request(0, (10, 1), (40, 3), (50, 1))])
    assert found.itl_median == 10
    assert found.itl_p99 == 10
    assert found.tokens_per_second == 100
    assert figures_of([request(0, (10, 2), (40, 3))]).tpot_mean == 10


def test_a_lone_token_has_no_gap() -> None:
    found = figures_of([request(0, (10, 1))])
    assert found.itl_median == found.tpot_mean == 0


def test_each_figure_is_the_median_of_its_rounds() -> None:
    rounds = [figures(10), figures(30), figures(20)]
    assert median_figures(rounds) == figures(20)


def test_a_ratio_compares_neighbours_in_time() -> None:
    slower_and_slower = [figures(100), figures(50), figures(10)]
    half_of_each = [figures(50), figures(25), figures(5)]
    assert median_ratio(half_of_each, slower_and_slower) == 0.5


def test_times_per_token_are_compared_in_the_same_way() -> None:
    slower_and_slower = [figures(1, tpot_mean=each) for each in (1, 2, 10)]
    half_as_much_again = [figures(1, tpot_mean=each) for each in (1.5, 3, 15)]
    assert median_tpot_ratio(half_as_much_again, slower_and_slower) == 1.5
    assert median_tpot_ratio([figures(1, tpot_mean=0)], [figures(1, tpot_mean=0)]) == 1


def test_rounds_begin_with_another_side_each_time() -> None:
    assert interleaved(["a", "b", "c"], 4) == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_a_load_is_the_same_tokens_every_time_and_no_two_prompts_share_a_prefix() -> None:
    load = Load(2, 1, 16, 4, vocab_size=1000, seed="x")
    assert load.prompt(0) == load.prompt(0)
    assert len(load.prompt(0)) == 16
    assert load.prompt(0)[:4] != load.prompt(1)[:4]
    assert max(load.prompt(0)) < 1000
