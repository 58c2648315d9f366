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
    """A slope, and half of the width of the slope's 95 % confidence interval, in the same unit."""

    value: float
    margin: float

    @property
    def at_least(self) -> float:
        return self.value - self.margin


def slope_of(points: Sequence[Point]) -> Slope:
    """The least-squares slope of y over x. Points must be in the order of x. Raises ValueError if
    there are fewer than NUM_BATCHES points.

    Consecutive samples of a process's memory are strongly correlated, so the confidence interval of
    a fit through all samples would be far too narrow. Therefore the samples are divided into
    batches, and the fit uses the batches' means, which are far enough apart to count as independent
    (Law and Carson, 1979).
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
