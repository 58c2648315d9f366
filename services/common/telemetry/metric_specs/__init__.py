"""The registry of all metrics. Services create their metric families from it by name.

`docs/metrics.md` lists the same metrics.
"""

from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from services.common.telemetry.metric_specs import edge, process, replica, shared_state, vllm
from services.common.telemetry.metric_specs.spec import Kind, MetricSpec

SPECS: dict[str, MetricSpec] = {
    spec.name: spec
    for specs in (vllm.SPECS, replica.SPECS, edge.SPECS, shared_state.SPECS, process.SPECS)
    for spec in specs
}
"""Maps metric names, without a counter's suffix `_total`, to the metrics' specifications."""

ValueFamily: TypeAlias = GaugeMetricFamily | CounterMetricFamily


def value_family(name: str) -> ValueFamily:
    """Creates an empty gauge or counter family. Raises KeyError for an unlisted name."""
    spec = SPECS[name]
    if spec.kind is Kind.COUNTER:
        return CounterMetricFamily(spec.name, spec.text, labels=spec.labels)
    _of_kind(name, Kind.GAUGE)
    return GaugeMetricFamily(spec.name, spec.text, labels=spec.labels)


def histogram_family(name: str) -> HistogramMetricFamily:
    """Creates an empty histogram family. Raises KeyError if the name is not a histogram's."""
    spec = _of_kind(name, Kind.HISTOGRAM)
    return HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)


def summary_family(name: str) -> SummaryMetricFamily:
    """Creates an empty summary family. Raises KeyError if the name is not a summary's."""
    spec = _of_kind(name, Kind.SUMMARY)
    return SummaryMetricFamily(spec.name, spec.text, labels=spec.labels)


def single(name: str, value: float) -> Metric:
    """Creates a gauge or a counter with one value and no labels."""
    metric = value_family(name)
    metric.add_metric((), value)
    return metric


def _of_kind(name: str, kind: Kind) -> MetricSpec:
    spec = SPECS[name]
    if spec.kind is not kind:
        raise KeyError(f"{name} is a {spec.kind.value}, not a {kind.value}")
    return spec
