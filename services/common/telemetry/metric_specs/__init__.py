"""The specifications of metrics, from which services create metric families. Optional parts of the
gateway specify their metrics in their own folders. `docs/metrics.md` lists all metrics.
"""

from collections.abc import Mapping
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from services.common.telemetry.metric_specs import edge, process, replica, vllm
from services.common.telemetry.metric_specs.spec import Kind, MetricSpec

SPECS = (*vllm.SPECS, *replica.SPECS, *edge.SPECS, *edge.INDEX_SPECS, *process.SPECS)

ValueFamily: TypeAlias = GaugeMetricFamily | CounterMetricFamily


def value_family(spec: MetricSpec) -> ValueFamily:
    """Creates an empty gauge or counter family. Raises KeyError for another kind of metric."""
    if spec.kind is Kind.COUNTER:
        return CounterMetricFamily(spec.name, spec.text, labels=spec.labels)
    _require(spec, Kind.GAUGE)
    return GaugeMetricFamily(spec.name, spec.text, labels=spec.labels)


def histogram_family(spec: MetricSpec) -> HistogramMetricFamily:
    """Creates an empty histogram family. Raises KeyError for another kind of metric."""
    _require(spec, Kind.HISTOGRAM)
    return HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)


def summary_family(spec: MetricSpec) -> SummaryMetricFamily:
    """Creates an empty summary family. Raises KeyError for another kind of metric."""
    _require(spec, Kind.SUMMARY)
    return SummaryMetricFamily(spec.name, spec.text, labels=spec.labels)


def single(spec: MetricSpec, value: float, *labels: str) -> Metric:
    """Creates a gauge or a counter with one value."""
    family = value_family(spec)
    family.add_metric(labels, value)
    return family


def by_label(spec: MetricSpec, values: Mapping[str, float], *labels: str) -> Metric:
    """Creates a gauge or a counter. `values` maps values of its last label to its values. `labels`
    are the values of the labels before it.
    """
    family = value_family(spec)
    for label, value in values.items():
        family.add_metric((*labels, label), value)
    return family


def _require(spec: MetricSpec, kind: Kind) -> None:
    if spec.kind is not kind:
        raise KeyError(f"{spec.name} is a {spec.kind.value}, not a {kind.value}")
