"""Percentiles, mean and standard deviation of a metric over all requests."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one metric over all requests, in the metric's unit. `std` is the population
    standard deviation, which is numpy's default, as in `vllm bench serve`.
    """

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: dict[int, float]


def distribution(values: Sequence[float]) -> Distribution | None:
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        count=len(ordered),
        mean=mean,
        std=statistics.pstdev(ordered, mean),
        min=ordered[0],
        max=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in PERCENTILES},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolates linearly between the two values next to the rank, as numpy does by default."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
