"""Computes latencies and throughput of a run from its requests' times, and medians over runs."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from benchmarks.common.load import RequestTimes


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. Latencies are in milliseconds.

    * ttft: time from sending a request to its first token;
    * itl: time between two tokens of a request. If k tokens arrive together, each counts as one
      k-th of the time since the previous arrival;
    * tpot: time from a request's first token to its last token, divided by the number of tokens
      after the first. This is the mean of the request's ITLs;
    * e2e: time from sending a request to its last token;
    * tokens_per_second: all output tokens, divided by the time from the first request to the last
      token.
    """

    ttft_median: float
    ttft_p99: float
    itl_median: float
    itl_p99: float
    tpot_median: float
    tpot_mean: float
    e2e_median: float
    tokens_per_second: float


def percentile(values: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile, which is the smallest value that is at least as large as
    `percent` percent of all values. Raises ValueError if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def percentile_interval(
    values: Iterable[float], percent: float, confidence: float = 0.95
) -> tuple[float, float]:
    """The confidence interval of a percentile. Both bounds are values of the sample.

    If the values are independent, the interval contains the true percentile with a probability of
    at least `confidence`. This holds for every distribution. The ranks of the bounds follow from
    the binomial distribution (Thompson, 1936).

    If there are too few values, the lower bound is 0 or the upper bound is infinite. An upper bound
    of a 99th percentile with a confidence of 95 % needs at least 368 values.
    """
    ordered, tail = sorted(values), (1 - confidence) / 2
    low, below = 0.0, 0.0
    for rank, value in enumerate(ordered):
        below += _binomial(len(ordered), rank, percent / 100)
        if below <= tail:
            low = value
        if 1 - below <= tail:
            return low, value
    return low, math.inf


def percentile_ratio_interval(
    these: Iterable[float], those: Iterable[float], percent: float
) -> tuple[float, float]:
    """The 95 % confidence interval of the percentile of `these` divided by the percentile of
    `those`. It combines two intervals of 97.5 % (Bonferroni).
    """
    least, most = percentile_interval(these, percent, 0.975)
    least_of_those, most_of_those = percentile_interval(those, percent, 0.975)
    return least / most_of_those, most / least_of_those if least_of_those else math.inf


def figures_of(times: Sequence[RequestTimes]) -> Figures:
    """The figures of one run. Every request must have at least one token."""
    first_tokens = [_millis(taken.arrivals[0][0] - taken.sent) for taken in times]
    gaps = [gap for taken in times for gap in _gaps(taken)] or [0.0]
    each = [_time_per_output_token(taken) for taken in times]
    whole = [_millis(taken.arrivals[-1][0] - taken.sent) for taken in times]
    begun = min(taken.sent for taken in times)
    ended = max(taken.arrivals[-1][0] for taken in times)
    return Figures(
        ttft_median=statistics.median(first_tokens),
        ttft_p99=percentile(first_tokens, 99),
        itl_median=statistics.median(gaps),
        itl_p99=percentile(gaps, 99),
        tpot_median=statistics.median(each),
        tpot_mean=statistics.fmean(each),
        e2e_median=statistics.median(whole),
        tokens_per_second=sum(taken.num_tokens for taken in times) * 1e9 / (ended - begun),
    )


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds."""
    columns = [asdict(figures) for figures in rounds]
    return Figures(
        **{
            field.name: statistics.median(column[field.name] for column in columns)
            for field in fields(Figures)
        }
    )


def median_ratio(these: Sequence[Figures], those: Sequence[Figures]) -> float:
    """The throughput of `these` divided by the throughput of `those`.

    The i-th elements are runs of the same round. The result is the median of the rounds' ratios.
    """
    return statistics.median(
        this.tokens_per_second / that.tokens_per_second
        for this, that in zip(these, those, strict=True)
    )


def median_tpot_ratio(these: Sequence[Figures], those: Sequence[Figures]) -> float:
    """The mean TPOT of `these` divided by the mean TPOT of `those`.

    The i-th elements are runs of the same round. The result is the median of the rounds' ratios. It
    is 1 for requests of one token.
    """
    return statistics.median(
        this.tpot_mean / that.tpot_mean if that.tpot_mean else 1.0
        for this, that in zip(these, those, strict=True)
    )


def interleaved(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """The order of the names in each round.

    Each round contains every name once. The names are rotated by one from round to round.
    """
    return [
        [names[(start + index) % len(names)] for index in range(len(names))]
        for start in range(num_rounds)
    ]


def _binomial(num_trials: int, num_successes: int, probability: float) -> float:
    num_failures = num_trials - num_successes
    ways = math.lgamma(num_trials + 1) - math.lgamma(num_successes + 1)
    ways -= math.lgamma(num_failures + 1)
    logs = num_successes * math.log(probability) + num_failures * math.log1p(-probability)
    return math.exp(ways + logs)


def _gaps(taken: RequestTimes) -> Iterable[float]:
    for (before, _), (now, count) in zip(taken.arrivals, taken.arrivals[1:], strict=False):
        yield from [_millis(now - before) / count] * count


def _time_per_output_token(taken: RequestTimes) -> float:
    """The TPOT of a request in milliseconds. It is 0 if all the tokens arrived at once."""
    (first, num_first), (last, _) = taken.arrivals[0], taken.arrivals[-1]
    return _millis(last - first) / max(taken.num_tokens - num_first, 1)


def _millis(nanos: int) -> float:
    return nanos / 1e6
