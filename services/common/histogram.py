"""A histogram that costs a bisection for each observation."""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from prometheus_client.core import HistogramMetricFamily

from services.common.exposition import number_text
from services.common.metric_specs import SPECS


class Histogram:
    """Counts observations by size, for one set of label values. One thread observes; another may
    read meanwhile.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, name: str) -> None:
        """`name` is that of a metric, which has the buckets."""
        self._bounds = SPECS[name].buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0
        """The sum of all observations."""

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Adds the buckets to a family, with these values of its labels."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            buckets.append((number_text(bound), total))
        family.add_metric(labels, buckets, self.sum)
