"""A Prometheus histogram in which an observation costs one bisection."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.samples import Exemplar

from services.common.telemetry.exposition import number_text
from services.common.telemetry.metric_specs import histogram_family
from services.common.telemetry.metric_specs.spec import MetricSpec


class Histogram:
    """Counts observations by bucket. One thread may observe while another thread reads."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_spec", "sum")

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec
        self._bounds = spec.buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Adds an observation. It becomes the bucket's exemplar if `trace_id` is not empty."""
        self.observe(value)
        if trace_id:
            exemplar = Exemplar({"trace_id": trace_id}, value, time.time())
            self._exemplars[bisect_left(self._bounds, value)] = exemplar

    def metric(self, *labels: str) -> HistogramMetricFamily:
        """The metric, with the series of this histogram alone."""
        family = histogram_family(self._spec)
        self.add_to(family, labels)
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        total, exemplars = 0, dict(self._exemplars)
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for number, (bound, count) in enumerate(
            zip((*self._bounds, inf), self._counts, strict=True)
        ):
            total += count
            exemplar = exemplars.get(number)
            bucket = number_text(bound), total
            buckets.append(bucket if exemplar is None else (*bucket, exemplar))
        family.add_metric(labels, buckets, self.sum)
