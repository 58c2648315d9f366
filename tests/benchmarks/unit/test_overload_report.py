"""The figures of the overload benchmark with two tenants, computed by hand."""

from pathlib import Path

import pytest

from benchmarks.common.process_usage import processor_wait_seconds
from benchmarks.soak.load_generator import Sent
from benchmarks.soak.overload_report import Line, lines_of
from benchmarks.soak.overload_tenants import Memory, Result, TenantOptions, sum_rounds
from services.cli.settings import UpSettings
from services.common.process.settings import parse_settings

MIB = 2**20
SECONDS, NUM_TOKENS = 20.0, 100
UNLOADED = "its p99 to the unloaded one"
BESIDE_FLOOD = "its p99 to that while the flood is sent elsewhere"
GOODPUT = "goodput to peak while the flood is sent elsewhere"


def options(rounds: int = 1) -> TenantOptions:
    services = parse_settings(UpSettings, "up", ["--model", "models/demo"], {})
    return TenantOptions(SECONDS, 10, 5, 32, 32, NUM_TOKENS, 0.5, 5, rounds, services)


def quiet(*first_token_millis: float) -> Sent:
    num = len(first_token_millis)
    return Sent(num, num, num, first_token_millis=list(first_token_millis))


def result(*, unloaded: Sent, beside_flood: Sent, flooded: Sent, beside: int = 800) -> Result:
    """A flood in which 1400 requests of the flooding tenant are done in 20 s."""
    return Result(
        peak=Sent(num_done_in_time=1000),
        peak_beside_flood=Sent(num_done_in_time=beside),
        unloaded=unloaded,
        unloaded_beside_flood=beside_flood,
        full=quiet(12.0),
        flood=Sent(20_000, 1400, 1400, refusal_millis=[1.0] * 18_600, processor_seconds=8.0),
        quiet=flooded,
        recovered=unloaded,
        memory=Memory(600 * MIB, 610 * MIB, 610 * MIB),
        processor_seconds={"gateway": 10.0},
        processor_wait_seconds={"gateway": 5.0},
    )


def line_of(wanted: str, lines: list[Line]) -> Line:
    (line,) = (line for line in lines if line.name == wanted)
    return line


def test_a_tail_is_compared_with_both_of_the_quiet_tenant_alone() -> None:
    """The quiet tenant's 30 ms during the flood are 3 times its time on an idle machine, and 1.5
    times its time while the flood is sent to another server.
    """
    lines = lines_of(
        options(), result(unloaded=quiet(5, 10), beside_flood=quiet(5, 20), flooded=quiet(15, 30))
    )
    to_unloaded, to_beside = line_of(UNLOADED, lines), line_of(BESIDE_FLOOD, lines)
    assert to_unloaded.value == "3.00 (too few for an interval)"
    assert to_unloaded.passed is False
    assert to_beside.value == "1.50 (too few for an interval)"
    assert to_beside.passed is True


def test_a_quotient_has_the_interval_of_its_two_tails() -> None:
    """The values are evenly spaced, so that the bounds of each p99 are near the p99."""
    millis = [1 + index / 1000 for index in range(1000)]
    twice = [2 * one for one in millis]
    lines = lines_of(
        options(),
        result(unloaded=quiet(*millis), beside_flood=quiet(*twice), flooded=quiet(*twice)),
    )
    value, _, interval = line_of(UNLOADED, lines).value.partition(" ")
    least, most = map(float, interval.strip("()").split(" to "))
    assert value == "2.00"
    assert 1.98 <= least < 2 < most <= 2.02
    assert line_of(BESIDE_FLOOD, lines).value.startswith("1.00 (")


@pytest.mark.parametrize(("num_quiet", "passed"), [(40, True), (39, False)])
def test_goodput_is_of_both_tenants_and_judged_by_the_peak_beside_the_flood(
    num_quiet: int, passed: bool
) -> None:
    """The peak is 800 requests in 10 s. The goal is 0.9 of the peak: 1440 requests in 20 s."""
    flooded = quiet(*[10.0] * num_quiet)
    lines = lines_of(options(), result(unloaded=quiet(10), beside_flood=quiet(10), flooded=flooded))
    assert line_of(GOODPUT, lines).passed is passed
    assert line_of("goodput to peak", lines).value == "0.72"


def test_rounds_are_summed_part_by_part() -> None:
    """In each round the goodput is 0.9 of the peak: 1440 requests in 20 s, and 800 in 10 s."""
    one = result(unloaded=quiet(10), beside_flood=quiet(10), flooded=quiet(*[10.0] * 40))
    other = result(unloaded=quiet(11), beside_flood=quiet(12), flooded=quiet(*[33.0] * 40))
    lines = lines_of(options(rounds=2), sum_rounds([one, other]))
    assert line_of(GOODPUT, lines).value == "0.90"
    of_one = line_of("share of the processors: gateway", lines_of(options(), one))
    assert line_of("share of the processors: gateway", lines) == of_one
    assert line_of(UNLOADED, lines).value.startswith("3.00 (")
    assert line_of("quiet tenant: requests sent / done", lines).value == "80 / 80"


def test_a_part_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no request was done"):
        lines_of(options(), result(unloaded=quiet(10), beside_flood=Sent(9), flooded=quiet(10)))
    with pytest.raises(RuntimeError, match="no request was done in time"):
        lines_of(
            options(),
            result(unloaded=quiet(10), beside_flood=quiet(10), flooded=quiet(10), beside=0),
        )


def test_waits_for_a_processor_are_summed_over_threads(tmp_path: Path) -> None:
    for thread, waited in (("7", 1_500_000_000), ("8", 250_000_000)):
        (tmp_path / "7" / "task" / thread).mkdir(parents=True)
        (tmp_path / "7" / "task" / thread / "schedstat").write_text(f"900 {waited} 33\n")
    (tmp_path / "7" / "task" / "9").mkdir()  # a thread that has just ended
    assert processor_wait_seconds(7, tmp_path) == 1.75
