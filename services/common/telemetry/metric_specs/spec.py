"""What a metric is: its name, type, labels, unit and meaning, and which service measures it."""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The types of Prometheus' text format that are used."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"
    """A count and a sum, so that rate(sum) / rate(count) is the mean over any stretch of time."""


class Source(enum.Enum):
    """The service that measures a metric. What a replica's scheduler, pool and workers measure is
    served at the scheduler's port, and at the gateway's for all replicas, with the labels of
    `added_labels`.
    """

    SCHEDULER = "scheduler"
    KVPOOL = "kvpool"
    WORKER = "worker"
    GATEWAY = "gateway"
    EVERY = "every service"

    @property
    def added_labels(self) -> tuple[str, ...]:
        """Labels besides those of the metric itself. Of a replica's processes those of EVERY have
        the labels of a replica too.
        """
        return _ADDED_LABELS[self]


_ADDED_LABELS = {
    Source.SCHEDULER: ("model_name", "engine"),
    Source.KVPOOL: ("model_name", "engine"),
    Source.WORKER: ("model_name", "engine", "rank"),
    Source.GATEWAY: (),
    Source.EVERY: ("service",),
}


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` is without the `_total` that a counter has in the text format."""

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    """Labels whose values the service passes, in the order in which it passes them."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""
    source: Source = Source.GATEWAY

    @property
    def served_name(self) -> str:
        """The name in the text format; a histogram's and a summary's series have suffixes to it."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def gauge(name: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A value that goes up and down."""
    return MetricSpec(name, Kind.GAUGE, unit, text, labels)


def counter(name: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A count that only grows, until its process is replaced."""
    return MetricSpec(name, Kind.COUNTER, unit, text, labels)


def histogram(
    name: str, unit: str, text: str, buckets: tuple[float, ...], *labels: str
) -> MetricSpec:
    """Observations counted by size."""
    return MetricSpec(name, Kind.HISTOGRAM, unit, text, labels, buckets)


def summary(name: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """The count and the sum of observations."""
    return MetricSpec(name, Kind.SUMMARY, unit, text, labels)
