"""The registry of all metrics. What a service serves is made with `family`, by its name here;
`docs/metrics.md` lists the same.
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
"""By name, without a counter's `_total`."""

ValueFamily: TypeAlias = GaugeMetricFamily | CounterMetricFamily


def value_family(name: str) -> ValueFamily:
    """An empty family of a gauge or a counter. Raises KeyError for a name that is not listed."""
    spec = SPECS[name]
    if spec.kind is Kind.COUNTER:
        return CounterMetricFamily(spec.name, spec.text, labels=spec.labels)
    _of_kind(name, Kind.GAUGE)
    return GaugeMetricFamily(spec.name, spec.text, labels=spec.labels)


def histogram_family(name: str) -> HistogramMetricFamily:
    """An empty family of a histogram. Raises KeyError for a name that is not listed as one."""
    spec = _of_kind(name, Kind.HISTOGRAM)
    return HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)


def summary_family(name: str) -> SummaryMetricFamily:
    """An empty family of a summary. Raises KeyError for a name that is not listed as one."""
    spec = _of_kind(name, Kind.SUMMARY)
    return SummaryMetricFamily(spec.name, spec.text, labels=spec.labels)


def single(name: str, value: float) -> Metric:
    """A gauge or a counter without labels, with its value."""
    metric = value_family(name)
    metric.add_metric((), value)
    return metric


def _of_kind(name: str, kind: Kind) -> MetricSpec:
    spec = SPECS[name]
    if spec.kind is not kind:
        raise KeyError(f"{name} is a {spec.kind.value}, not a {kind.value}")
    return spec
