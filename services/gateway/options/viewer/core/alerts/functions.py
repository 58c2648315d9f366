"""Functions, aggregations and operators of PromQL, with Prometheus' results."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from services.gateway.options.viewer.core.alerts.series_store import Labels, Numbers, Vector

_EXTRAPOLATED = 1.1
"""A series is assumed to continue to the end of a window if its last sample is less than this
number of mean intervals away from it.
"""

OverTime = Callable[[Numbers, Numbers, float, float], float | None]
"""Computes a value from the times and values of a series in a window, and the window's bounds."""


def increase(times: Numbers, values: Numbers, began: float, ended: float) -> float | None:
    """Returns a counter's growth, extrapolated to the bounds of the window, or None if there are
    fewer than two samples. A smaller value than before is a restart from 0.
    """
    if len(times) < 2:
        return None
    restarts = sum(before for before, after in pairwise(values) if after < before)
    gained = values[-1] - values[0] + restarts
    sampled = times[-1] - times[0]
    interval = sampled / (len(times) - 1)
    before, after = times[0] - began, ended - times[-1]
    if before >= interval * _EXTRAPOLATED:
        before = interval / 2
    if gained > 0 <= values[0]:
        before = min(before, sampled * values[0] / gained)  # The counter began at 0.
    if after >= interval * _EXTRAPOLATED:
        after = interval / 2
    return gained * (sampled + before + after) / sampled


def rate(times: Numbers, values: Numbers, began: float, ended: float) -> float | None:
    gained = increase(times, values, began, ended)
    return None if gained is None else gained / (ended - began)


OVER_TIME: Mapping[str, OverTime] = {
    "increase": increase,
    "rate": rate,
    "changes": lambda _t, values, _b, _e: float(
        sum(before != after for before, after in pairwise(values))
    ),
    "max_over_time": lambda _t, values, _b, _e: max(values),
}

AGGREGATIONS: Mapping[str, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
}


def histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    """Returns a quantile of each histogram, by linear interpolation within a bucket.
    Series without a valid bound are ignored.
    """
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        if (bound := _bound(labels)) is not None:
            rest = frozenset(label for label in labels if label[0] != "le")
            histograms.setdefault(rest, []).append((bound, value))
    return {labels: _quantile(quantile, sorted(each)) for labels, each in histograms.items()}


def _bound(labels: Labels) -> float | None:
    try:
        return next(float(text) for name, text in labels if name == "le")
    except (StopIteration, ValueError):
        return None


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    total = buckets[-1][1]
    if len(buckets) < 2 or not total > 0 or not math.isinf(buckets[-1][0]):
        return math.nan
    rank = quantile * total
    at = next((index for index, (_, count) in enumerate(buckets) if count >= rank), len(buckets))
    if at >= len(buckets) - 1:
        return buckets[-2][0]
    bound, count = buckets[at]
    low, below = buckets[at - 1] if at else (0.0, 0.0)
    return low + (bound - low) * (rank - below) / (count - below)


def divide(one: float, other: float) -> float:
    if other:
        return one / other
    return math.copysign(math.inf, one) if one else math.nan


ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
}
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
