"""The analysis of soak samples, on series with known growth."""

import os
from dataclasses import replace
from random import Random

import pytest

from benchmarks.common.process_usage import Usage, usage_of
from benchmarks.soak.attack.findings import Sample, findings, table
from benchmarks.soak.day import Outcome
from benchmarks.soak.slope import slope_of

MB = 1_000_000
FLAT = Usage(rss=100 * MB, pss=80 * MB, num_threads=9, num_files=30)
BOUND_MB_PER_HOUR = 24.0


def samples(usages: list[Usage]) -> list[Sample]:
    """Samples of one process, five seconds apart."""
    return [Sample(5.0 * number, {"worker": usage}) for number, usage in enumerate(usages)]


def complaint(usages: list[Usage], warm_up_seconds: float = 0) -> str:
    [finding] = findings(samples(usages), warm_up_seconds, BOUND_MB_PER_HOUR)
    return finding.complaint


def noisy(slope_mb_per_hour: float) -> list[Usage]:
    """The memory of a process over 20 minutes: a linear slope with random noise."""
    draw = Random(7)
    return [
        replace(FLAT, rss=int(FLAT.rss + (slope_mb_per_hour * n / 720 + draw.gauss(0, 2)) * MB))
        for n in range(240)
    ]


def test_a_slope_is_found_within_its_margin() -> None:
    draw = Random(1)
    slope = slope_of([(x, 3.0 * x + draw.gauss(0, 5)) for x in map(float, range(200))])
    assert slope.margin < 0.1
    assert slope.at_least < 3.0 < slope.value + slope.margin
    exact = slope_of([(x, 2.0 - x) for x in map(float, range(10))])
    assert (exact.value, exact.margin) == (pytest.approx(-1), pytest.approx(0))


def test_too_few_points_have_no_slope() -> None:
    with pytest.raises(ValueError, match="9 points are too few"):
        slope_of([(float(x), 0.0) for x in range(9)])


def test_memory_that_only_goes_up_and_down_is_flat() -> None:
    assert complaint(noisy(0)) == ""
    assert "flat" in table(findings(samples(noisy(0)), 0, BOUND_MB_PER_HOUR))


def test_memory_that_grows_is_found_through_the_noise() -> None:
    assert complaint(noisy(60)).startswith("memory by ")
    assert complaint(noisy(12)) == "", "below the bound"


def test_growth_before_the_warm_up_has_ended_does_not_count() -> None:
    grown = replace(FLAT, rss=300 * MB)
    usages = [FLAT] * 20 + [grown] * 60
    assert complaint(usages, warm_up_seconds=100) == ""
    assert complaint(usages) != ""


def test_threads_and_files_that_pile_up_are_found() -> None:
    usages = [replace(FLAT, num_threads=9 + n, num_files=30 + 2 * n) for n in range(40)]
    assert complaint(usages) == "threads from 12 to 48, files from 36 to 108"
    assert complaint([replace(FLAT, num_files=30 + n % 10) for n in range(40)]) == ""


def test_this_process_holds_something() -> None:
    before = usage_of(os.getpid())
    reading, writing = os.pipe()
    after = usage_of(os.getpid())
    os.close(reading)
    os.close(writing)
    assert after.num_files == before.num_files + 2
    assert after.num_threads >= 1
    assert after.rss >= after.pss > MB
    with pytest.raises(OSError, match="No such file"):
        usage_of(2**22 + 1)


def test_a_day_is_good_if_contexts_remain_and_nothing_grew_or_warned() -> None:
    good = Outcome(8, 8, (10_000, 10_050), ())
    assert good.is_good
    assert not replace(good, num_continued=7).is_good
    assert not replace(good, num_objects=(10_000, 10_200)).is_good
    assert not replace(good, warnings=("scheduler-0 WARNING the worker was lost",)).is_good
