"""The slope of a series of samples, with its confidence interval."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BATCHES = 10
_STUDENT_95 = 2.306
"""The 97.5 % quantile of Student's distribution with NUM_BATCHES - 2 degrees of freedom."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Slope:
    """A rate of growth, and half of the width of its 95 % confidence interval."""

    value: float
    margin: float

    @property
    def at_least(self) -> float:
        """The interval's lower end."""
        return self.value - self.margin


def slope_of(points: Sequence[Point]) -> Slope:
    """The least-squares slope of y over x. It needs at least NUM_BATCHES points in the order of x;
    fewer raise ValueError.

    Consecutive samples of a process's memory are strongly correlated, so the confidence interval of
    a fit through all of them would be far too narrow. The fit uses means of batches instead (as in
    simulations: Law and Carson, 1979), which are far enough apart to count as independent.
    """
    if len(points) < NUM_BATCHES:
        raise ValueError(f"{len(points)} points are too few for {NUM_BATCHES} batches")
    cuts = [len(points) * number // NUM_BATCHES for number in range(NUM_BATCHES + 1)]
    means = [
        tuple(map(statistics.fmean, zip(*points[begin:end], strict=True)))
        for begin, end in itertools.pairwise(cuts)
    ]
    xs, ys = ([mean[axis] for mean in means] for axis in range(2))
    slope, intercept = statistics.linear_regression(xs, ys)
    middle = statistics.fmean(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    residue = sum((y - intercept - slope * x) ** 2 for x, y in means)
    error = math.sqrt(residue / (NUM_BATCHES - 2) / spread)
    return Slope(slope, _STUDENT_95 * error)
