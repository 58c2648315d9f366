"""The goals of the measurement with two tenants, and the table of its figures."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.figures import percentile, percentile_interval, percentile_ratio_interval
from benchmarks.soak.load_generator import Sent
from benchmarks.soak.overload_tenants import Result, TenantOptions
from services.common.process.processors import usable_processors

LEAST_GOODPUT = 0.9
MOST_TTFT, MOST_RECOVERED_TTFT = 2.0, 1.25
MOST_REFUSAL_MILLIS = 50.0
MOST_MEBIBYTES = 64.0
_MEDIAN_AND_P99 = "TTFT ms, median / p99"


@dataclass(frozen=True, slots=True)
class Line:
    """A figure, and whether it meets its goal (None if it has no goal)."""

    name: str
    value: str
    passed: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "pass", False: "FAIL"}[self.passed]
        return f"| {self.name} | {self.value} | {verdict} |"


def lines_of(options: TenantOptions, result: Result) -> list[Line]:
    """The figures of a result. Raises RuntimeError if a part has no finished requests."""
    quiet = (result.unloaded, result.unloaded_beside_flood, result.full, result.quiet)
    if not all(part.first_token_millis for part in (*quiet, result.recovered)):
        raise RuntimeError("no request was done: the machine is too busy to measure anything")
    return [
        *_goodput_lines(options, result),
        *_flooding_lines(result),
        *_quiet_lines(result),
        *_recovery_lines(options, result),
        *_processor_lines(options, result),
    ]


def report(options: TenantOptions, lines: Sequence[Line]) -> str:
    return "\n".join(
        [
            f"| one of two tenants asks for {options.factor:g} times the peak, "
            f"rounds of {options.seconds:g} s: {options.rounds} | | |",
            "| --- | ---: | --- |",
            *map(str, lines),
        ]
    )


def _goodput_lines(options: TenantOptions, result: Result) -> list[Line]:
    """Compares the goodput during the flood with the peaks measured without it. Goodput is the
    tokens per second of answers that ended in time. Each peak is measured for half as long as the
    flood.
    """
    tokens, seconds = options.output_tokens, options.seconds * options.rounds
    peak = result.peak.num_done_in_time * tokens / (seconds / 2)
    beside = result.peak_beside_flood.num_done_in_time * tokens / (seconds / 2)
    num_done = result.flood.num_done_in_time + result.quiet.num_done_in_time
    goodput = num_done * tokens / seconds
    if not (peak and beside):
        raise RuntimeError("no request was done in time: the parts are too short for this machine")
    return [
        Line("peak, tokens/s", f"{peak:.0f}"),
        Line("peak while the flood is sent elsewhere, tokens/s", f"{beside:.0f}"),
        Line("goodput, tokens/s", f"{goodput:.0f}"),
        Line("goodput to peak", f"{goodput / peak:.2f}"),
        Line(
            "goodput to peak while the flood is sent elsewhere",
            f"{goodput / beside:.2f}",
            goodput >= LEAST_GOODPUT * beside,
        ),
    ]


def _flooding_lines(result: Result) -> list[Line]:
    refusals = result.flood.refusal_millis or [0.0]
    return [
        Line("flooding tenant: requests sent / done", _counts(result.flood)),
        Line(
            "refusals, ms, median / p99",
            _pair(refusals),
            percentile(refusals, 99) <= MOST_REFUSAL_MILLIS,
        ),
        Line("flooding tenant: requests that ended otherwise", str(result.flood.other or 0)),
    ]


def _quiet_lines(result: Result) -> list[Line]:
    """The quiet tenant's times to the first token during the flood, compared with its times without
    a flood and its times while the same flood is sent to another server.
    """
    unloaded, flooded = result.unloaded.first_token_millis, result.quiet.first_token_millis
    beside = result.unloaded_beside_flood.first_token_millis
    full = result.full.first_token_millis
    num_lost = result.quiet.num_sent - result.quiet.num_done
    return [
        Line("quiet tenant: requests sent / done", _counts(result.quiet), not num_lost),
        Line(f"quiet tenant, unloaded: {_MEDIAN_AND_P99}", _pair_in(unloaded)),
        Line(
            f"quiet tenant, while the flood is sent elsewhere: {_MEDIAN_AND_P99}", _pair_in(beside)
        ),
        Line(f"quiet tenant, all places taken: {_MEDIAN_AND_P99}", _pair_in(full)),
        Line(f"quiet tenant, during the flood: {_MEDIAN_AND_P99}", _pair_in(flooded)),
        _slowdown("its p99 to the unloaded one", flooded, unloaded),
        _slowdown("its p99 to that while the flood is sent elsewhere", flooded, beside),
    ]


def _slowdown(name: str, these: Sequence[float], those: Sequence[float]) -> Line:
    """The p99 of `these` divided by the p99 of `those`, with its confidence interval."""
    ratio = percentile(these, 99) / percentile(those, 99)
    interval = _interval(*percentile_ratio_interval(these, those, 99), digits=2)
    return Line(name, f"{ratio:.2f} ({interval})", ratio <= MOST_TTFT)


def _recovery_lines(options: TenantOptions, result: Result) -> list[Line]:
    """The services' memory, and the quiet tenant's times to the first token, after the flood."""
    memory = result.memory
    mebibytes = [bytes_ / 2**20 for bytes_ in (memory.before, memory.flooded, memory.after)]
    recovered = result.recovered.first_token_millis
    ratio = statistics.median(recovered) / statistics.median(result.unloaded.first_token_millis)
    num_lost = result.recovered.num_sent - result.recovered.num_done
    later = f"{options.recovery_seconds:g} s later"
    return [
        Line(
            f"memory of the services, MiB, before / at the end / {later}",
            " / ".join(f"{one:.0f}" for one in mebibytes),
            max(mebibytes) <= mebibytes[0] + MOST_MEBIBYTES,
        ),
        Line(f"quiet tenant, {later}: {_MEDIAN_AND_P99}", _pair_in(recovered)),
        Line(
            "its median to the unloaded one",
            f"{ratio:.2f}",
            ratio <= MOST_RECOVERED_TTFT and not num_lost,
        ),
    ]


def _processor_lines(options: TenantOptions, result: Result) -> list[Line]:
    """How the services used the processors during the flood.

    For each process, the fraction of all processors' time that it used. For each service, how many
    of its threads waited for a processor on average.
    """
    seconds = options.seconds * options.rounds
    processors = usable_processors().num_allowed * seconds
    return [
        Line(
            "share of the processors: sending the flood",
            f"{result.flood.processor_seconds / processors:.2f}",
        ),
        *(
            Line(f"share of the processors: {name}", f"{used / processors:.2f}")
            for name, used in result.processor_seconds.items()
        ),
        *(
            Line(f"runnable threads without a processor, mean: {name}", f"{waited / seconds:.2f}")
            for name, waited in result.processor_wait_seconds.items()
        ),
    ]


def _counts(sent: Sent) -> str:
    return f"{sent.num_sent} / {sent.num_done}"


def _pair(millis: Sequence[float]) -> str:
    return f"{percentile(millis, 50):.1f} / {percentile(millis, 99):.1f}"


def _pair_in(millis: Sequence[float]) -> str:
    """The median and p99, the confidence interval of the p99, and the number of values."""
    interval = _interval(*percentile_interval(millis, 99), digits=1)
    return f"{_pair(millis)} ({interval}; {len(millis)} requests)"


def _interval(least: float, most: float, digits: int) -> str:
    """A confidence interval as text, or a note that there are too few requests for an interval."""
    if math.isinf(most):
        return "too few for an interval"
    return f"{least:.{digits}f} to {most:.{digits}f}"
