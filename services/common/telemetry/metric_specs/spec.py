"""The specification of a metric: name, type, labels, unit, meaning, and measuring service."""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The metric types that Stepwell uses, as Prometheus' text format names them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"
    """A count and a sum, so that rate(sum) / rate(count) is the mean over any period."""


class Source(enum.Enum):
    """The service that measures a metric. The scheduler also serves the metrics of its pool and
    workers. The gateway serves the metrics of all replicas, with the labels of `added_labels`.
    """

    SCHEDULER = "scheduler"
    KVPOOL = "kvpool"
    WORKER = "worker"
    GATEWAY = "gateway"
    EVERY = "every service"

    @property
    def added_labels(self) -> tuple[str, ...]:
        """Labels that are added to the metric's own labels. Metrics of source EVERY also have a
        replica's labels if they describe a process of this replica.
        """
        return _ADDED_LABELS[self]


_ADDED_LABELS = {
    Source.SCHEDULER: ("model_name", "engine"),
    Source.KVPOOL: ("model_name", "engine"),
    Source.WORKER: ("model_name", "engine", "rank"),
    Source.GATEWAY: (),
    Source.EVERY: ("service",),
}


@dataclass(frozen=True, slots=True, eq=False)
class MetricSpec:
    """One metric. A counter's `name` lacks the suffix `_total` that it has in the text format."""

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...]
    """Labels whose values the service supplies, in the order in which it supplies them."""
    source: Source
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, except infinity."""

    @property
    def served_name(self) -> str:
        """The name in the text format. The series of a histogram or summary have added suffixes."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


class Specs:
    """Specifies metrics of one source. `all` has the metrics in the order of their definition."""

    def __init__(self, source: Source) -> None:
        self.all: list[MetricSpec] = []
        self._source = source

    def gauge(self, name: str, unit: str, text: str, *labels: str) -> MetricSpec:
        return self._add(MetricSpec(name, Kind.GAUGE, unit, text, labels, self._source))

    def counter(self, name: str, unit: str, text: str, *labels: str) -> MetricSpec:
        return self._add(MetricSpec(name, Kind.COUNTER, unit, text, labels, self._source))

    def summary(self, name: str, unit: str, text: str, *labels: str) -> MetricSpec:
        return self._add(MetricSpec(name, Kind.SUMMARY, unit, text, labels, self._source))

    def histogram(
        self, name: str, unit: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> MetricSpec:
        kind = Kind.HISTOGRAM
        return self._add(MetricSpec(name, kind, unit, text, labels, self._source, buckets))

    def _add(self, spec: MetricSpec) -> MetricSpec:
        self.all.append(spec)
        return spec
