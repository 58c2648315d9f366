"""The registry of metrics. Services create their metric families from it by name. The metrics of a
gateway's options are specified in the options' folders. `docs/metrics.md` lists the same metrics.
"""

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

SPECS: dict[str, MetricSpec] = {
    spec.name: spec
    for specs in (vllm.SPECS, replica.SPECS, edge.SPECS, edge.INDEX_SPECS, process.SPECS)
    for spec in specs
}
"""Maps metric names, without a counter's suffix `_total`, to the metrics' specifications."""

ValueFamily: TypeAlias = GaugeMetricFamily | CounterMetricFamily


def value_family(metric: str | MetricSpec) -> ValueFamily:
    """Creates an empty gauge or counter family, by name or specification. Raises KeyError."""
    spec = SPECS[metric] if isinstance(metric, str) else metric
    if spec.kind is Kind.COUNTER:
        return CounterMetricFamily(spec.name, spec.text, labels=spec.labels)
    _require(spec, Kind.GAUGE)
    return GaugeMetricFamily(spec.name, spec.text, labels=spec.labels)


def histogram_family(name: str) -> HistogramMetricFamily:
    """Creates an empty histogram family. Raises KeyError if the name is not a histogram's."""
    spec = _of_kind(name, Kind.HISTOGRAM)
    return HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)


def summary_family(name: str) -> SummaryMetricFamily:
    """Creates an empty summary family. Raises KeyError if the name is not a summary's."""
    spec = _of_kind(name, Kind.SUMMARY)
    return SummaryMetricFamily(spec.name, spec.text, labels=spec.labels)


def single(metric: str | MetricSpec, value: float) -> Metric:
    """Creates a gauge or a counter with one value and no labels."""
    family = value_family(metric)
    family.add_metric((), value)
    return family


def _of_kind(name: str, kind: Kind) -> MetricSpec:
    spec = SPECS[name]
    _require(spec, kind)
    return spec


def _require(spec: MetricSpec, kind: Kind) -> None:
    if spec.kind is not kind:
        raise KeyError(f"{spec.name} is a {spec.kind.value}, not a {kind.value}")
