"""Arrival times of the requests of `stepwell bench`: gaps, and steps and ramps of the rate."""

import math
import random
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.core.rate import Piece, RequestRate, unit_arrivals

NUM_ARRIVALS = 20_000


def gaps(burstiness: float, seed: str = "0") -> list[float]:
    times = list(islice(unit_arrivals(burstiness, random.Random(seed)), NUM_ARRIVALS))
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_gamma_distribution(burstiness: float) -> None:
    drawn = gaps(burstiness)
    assert np.mean(drawn) == pytest.approx(1.0, rel=0.05)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    """In a Poisson process of rate 1, the fraction of gaps that are longer than t is exp(-t)."""
    drawn = np.array(gaps(1.0))
    for seconds in (0.1, 0.5, 1.0, 3.0):
        assert np.mean(drawn > seconds) == pytest.approx(math.exp(-seconds), abs=0.015)


def test_an_infinite_burstiness_is_a_constant_gap() -> None:
    times = RequestRate.parse("4").times(unit_arrivals(math.inf, random.Random(0)))
    assert list(islice(times, 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert gaps(1.0, "a") == gaps(1.0, "a") != gaps(1.0, "b")


def test_steps_have_their_rates_and_end() -> None:
    rate = RequestRate.parse("2:10,8:5")
    times = list(rate.times(unit_arrivals(math.inf, random.Random(0))))
    assert sum(time < 10 for time in times) == 20
    assert sum(10 <= time < 15 for time in times) == 40
    assert times[20:23] == [10.0, 10.125, 10.25]
    assert len(times) == 61  # the last arrival is at the end, 15 s


def test_an_infinite_rate_sends_all_at_once() -> None:
    times = RequestRate.parse("inf").times(unit_arrivals(1.0, random.Random(0)))
    assert list(islice(times, 100)) == [0.0] * 100


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 1000), st.floats(0, 1))
def test_a_ramp_is_the_inverse_of_the_integral_of_its_rate(
    first: float, last: float, seconds: float, share: float
) -> None:
    piece = Piece(first, last, seconds)
    time = share * seconds
    arrivals = first * time + (last - first) / seconds * time**2 / 2
    assert piece.seconds_until(arrivals) == pytest.approx(time, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "2:", "2-8", "2,8:3", "1-inf:3", "inf:3", "2:inf", "nan"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        RequestRate.parse(text)
