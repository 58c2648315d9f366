"""Metrics in Prometheus' text format: added labels, merged texts, and exemplars."""

from collections.abc import Iterable
from importlib.metadata import version

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.common.rpc.protocol import PROTOCOL
from services.common.telemetry.exposition import (
    Exposition,
    merged,
    open_metrics,
    wants_open_metrics,
)
from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import vllm


class These(Collector):
    """A collector of fixed metrics."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def gauge(name: str, labels: dict[str, str], value: float, text: str = "It.") -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def without_process(text: bytes) -> str:
    """The text without the process metrics, which are at its end."""
    return text.decode().partition("# HELP process_")[0]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples by name and labels, as read by the parser of prometheus_client."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_series_gets_the_labels_and_names_keep_their_colons() -> None:
    counter = CounterMetricFamily("vllm:tokens", "Tokens.", labels=("kind",))
    counter.add_metric(["prompt"], 3)
    counter.add_metric(["generated"], 0.5)
    text = Exposition("scheduler", [These(counter)], labels={"engine": "a"}).render({"rank": "0"})
    assert without_process(text) == (
        "# HELP vllm:tokens_total Tokens.\n"
        "# TYPE vllm:tokens_total counter\n"
        'vllm:tokens_total{engine="a",kind="prompt",rank="0"} 3.0\n'
        'vllm:tokens_total{engine="a",kind="generated",rank="0"} 0.5\n'
    )


def test_a_series_with_another_value_of_an_added_label_is_left_out() -> None:
    family = GaugeMetricFamily("stepwell_blocks", "Blocks.", labels=("engine",))
    family.add_metric(["a"], 1)
    family.add_metric(["b"], 2)
    other = gauge("stepwell_of_b", {"engine": "b"}, 3)
    text = Exposition("kvpool", [These(family, other)]).render({"engine": "a"})
    assert without_process(text) == (
        "# HELP stepwell_blocks Blocks.\n"
        "# TYPE stepwell_blocks gauge\n"
        'stepwell_blocks{engine="a"} 1.0\n'
    )


def test_unusual_values_and_labels_are_read_again_as_they_were() -> None:
    odd = 'a"b\\c\nd # HELP x y'
    numbers = (float("inf"), float("-inf"), 1e300, 0.1, -2.0)
    family = GaugeMetricFamily("stepwell_odd", "Line\nand \\ slash.", labels=("name",))
    for index, number in enumerate(numbers):
        family.add_metric([f"{odd}{index}"], number)
    text = Exposition("gateway", [These(family)]).render()
    read = samples(merged([text, text[:0]]).decode())
    for index, number in enumerate(numbers):
        assert read["stepwell_odd", (("name", f"{odd}{index}"),)] == number


def test_every_process_has_the_standard_metrics_with_its_service() -> None:
    text = Exposition("worker", [], labels={"engine": "a"}).render({"rank": "1"}).decode()
    labels = (("engine", "a"), ("rank", "1"), ("service", "worker"))
    read = samples(text)
    assert read["process_resident_memory_bytes", labels] > 1e6
    assert read["process_cpu_seconds_total", labels] > 0
    assert read["process_open_fds", labels] > 2
    release = (("protocol", str(PROTOCOL)), ("version", version("stepwell")))
    assert read["stepwell_build_info", tuple(sorted((*labels, *release)))] == 1


def test_texts_are_put_together_metric_by_metric() -> None:
    def text_of(engine: str, value: float) -> bytes:
        metrics = These(
            gauge("stepwell_one", {"engine": engine}, value),
            gauge(f"stepwell_of_{engine}", {}, value),
        )
        return without_process(Exposition("s", [metrics]).render()).encode()

    assert merged([text_of("a", 1), b"", text_of("b", 2)]).decode() == (
        "# HELP stepwell_one It.\n# TYPE stepwell_one gauge\n"
        'stepwell_one{engine="a"} 1.0\nstepwell_one{engine="b"} 2.0\n'
        "# HELP stepwell_of_a It.\n# TYPE stepwell_of_a gauge\nstepwell_of_a 1.0\n"
        "# HELP stepwell_of_b It.\n# TYPE stepwell_of_b gauge\nstepwell_of_b 2.0\n"
    )


def test_a_metric_that_another_version_has_with_another_type_is_left_out() -> None:
    old = b"# HELP x It.\n# TYPE x counter\nx 1\n# HELP y It.\n# TYPE y gauge\ny 2"
    new = b"# HELP x It, said better.\n# TYPE x gauge\nx 3\n# HELP y New.\n# TYPE y gauge\ny 4\n"
    assert merged([old, new]) == (
        b"# HELP x It.\n# TYPE x counter\nx 1\n# HELP y It.\n# TYPE y gauge\ny 2\ny 4\n"
    )


def timed(*traces: str) -> bytes:
    """The text of a counter, and of a histogram with one observation for each trace id."""
    histogram = Histogram(vllm.E2E_REQUEST_LATENCY)
    for number, trace_id in enumerate(traces):
        histogram.observe_traced(0.1 + number, trace_id)
    counter = CounterMetricFamily("vllm:tokens", 'Tokens "that" came.', labels=("kind",))
    counter.add_metric(['" # {trace_id="'], 3)
    return Exposition("gateway", [These(histogram.metric(), counter)]).render(exemplars=True)


def test_openmetrics_has_the_traces_of_buckets_and_reads_as_the_standard_asks() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    text = open_metrics(timed(trace_id, "")).decode()
    found = {}
    for family in openmetrics.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.exemplar is not None:
                found[sample.labels["le"]] = sample.exemplar
    ((bound, exemplar),) = found.items()
    assert exemplar.labels == {"trace_id": trace_id}
    assert exemplar.value == 0.1 <= float(bound)
    assert "# TYPE vllm:tokens counter\n" in text
    assert "vllm:tokens_total{" in text


def test_a_text_without_exemplars_has_none() -> None:
    plain = Exposition("gateway", [These(gauge("a", {}, 1))]).render()
    assert b"# {" not in plain


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4", True),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.7", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text;q=²", False),
    ],
)
def test_openmetrics_is_written_for_scrapers_that_prefer_it(accept: str, is_open: bool) -> None:
    assert wants_open_metrics(accept) is is_open
