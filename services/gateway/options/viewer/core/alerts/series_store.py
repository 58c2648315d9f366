"""Stores the recent samples of those series that rules and the page read."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_SERIES = 20_000
"""Limit on the number of stored series. 100 replicas have about 10 000."""

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
"""The values of an expression at one time, by labels. Metric names are not among the labels."""
Numbers: TypeAlias = "array[float]"
Accepts = Callable[[Labels], bool]


@dataclass(slots=True)
class Series:
    times: Numbers = field(default_factory=lambda: array("d"))
    values: Numbers = field(default_factory=lambda: array("d"))


class SeriesStore:
    """The samples of each series, which are taken of all series at once. A series that is missing
    in the last sampling has ended, as in Prometheus.
    """

    def __init__(self, keep_seconds: Mapping[str, float]) -> None:
        """Maps each metric's name to the number of seconds for which its samples are needed. 0
        means that only the last sample is. Metrics with other names are not stored.
        """
        self.keep_seconds = keep_seconds
        self.began = self.now = 0.0
        self.num_left_out = 0
        """Number of series of the last sampling that are not stored because of MAX_SERIES."""
        self._series: dict[str, dict[Labels, Series]] = {name: {} for name in keep_seconds}
        self._num_series = 0

    def begin(self, now: float) -> None:
        """Begins a sampling at a later time than the sampling before."""
        self.began, self.now, self.num_left_out = self.began or now, now, 0

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Adds a sample to the sampling. `name` is a key of `keep_seconds`. If a series occurs
        twice, its first sample counts.
        """
        of_name = self._series[name]
        series = of_name.get(labels)
        if series is None:
            if self._num_series >= MAX_SERIES:
                self.num_left_out += 1
                return
            self._num_series += 1
            series = of_name[labels] = Series()
        elif series.times[-1] == self.now:
            return
        series.times.append(self.now)
        series.values.append(value)

    def end(self) -> None:
        """Ends a sampling: removes all samples that are too old, except the last one of them."""
        for name, of_name in self._series.items():
            oldest = self.now - self.keep_seconds[name]
            for labels, series in list(of_name.items()):
                if series.times[-1] < oldest:
                    del of_name[labels]
                    self._num_series -= 1
                elif (old := bisect_right(series.times, oldest) - 1) > 0:
                    del series.times[:old], series.values[:old]

    def vector(self, name: str, accepts: Accepts = lambda _: True) -> Vector:
        """Returns the values of a metric's series in the last sampling."""
        return {
            labels: series.values[-1]
            for labels, series in self._series[name].items()
            if series.times[-1] == self.now and accepts(labels)
        }

    def windows(
        self, name: str, seconds: float, accepts: Accepts = lambda _: True
    ) -> dict[Labels, tuple[Numbers, Numbers]]:
        """Returns the times and values of each series in the last `seconds`, without the sample at
        their very beginning.
        """
        found = {}
        for labels, series in self._series[name].items():
            first = bisect_right(series.times, self.now - seconds)
            if first < len(series.times) and accepts(labels):
                found[labels] = (series.times[first:], series.values[first:])
        return found

    def gained(self, name: str, seconds: float) -> Vector:
        """Returns by how much counters of this process grew since their last sample that is at
        least `seconds` old. Without such a sample, a counter began at 0 within this time, because
        sampling begins soon after the process.
        """
        grown = {}
        for labels, series in self._series[name].items():
            before = bisect_right(series.times, self.now - seconds) - 1
            grown[labels] = series.values[-1] - (series.values[before] if before >= 0 else 0.0)
        return grown
