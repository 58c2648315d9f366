"""Metrics of one or several processes in Prometheus' text format 0.0.4 or in OpenMetrics.

This module writes both formats itself, because client libraries replace `vllm:` by `vllm_` in
OpenMetrics and in version 1.0.0 of the text format, unless names may be UTF-8. Processes exchange
texts in format 0.0.4, with exemplars if requested, which `open_metrics` converts to OpenMetrics.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar, Sample

from services.common.process.watchdog import proc
from services.common.rpc.protocol import own_release
from services.common.telemetry.metric_specs import process, single

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_HEADER = b"# HELP "


class Exposition:
    """The metrics of one process. `render` reads them and may be called from any thread. `own` are
    metrics of this service alone. `shared` are metrics that every service has. The shared metrics
    and the metrics of the process, such as its memory, have the added label `service`.
    """

    def __init__(
        self,
        service: str,
        own: Iterable[Collector],
        shared: Iterable[Collector] = (),
        labels: Mapping[str, str] | None = None,
        *,
        has_process: bool = True,
    ) -> None:
        """If `has_process` is false, the metrics of the process and `shared` are omitted."""
        self._own = tuple(own)
        of_process = ProcessCollector(proc=proc.PROC, registry=CollectorRegistry())
        self._shared = (of_process, _BuildCollector(), *shared) if has_process else ()
        self._labels = dict(labels or {})
        self._service = {"service": service}

    def render(
        self,
        labels: Mapping[str, str] | None = None,
        hidden_labels: Collection[str] = (),
        *,
        exemplars: bool = False,
    ) -> bytes:
        """Returns the metrics in format 0.0.4, with `labels` added to all series. A series is
        omitted if it already has one of the added labels with another value, or if it has any of
        `hidden_labels`. Buckets have exemplars if `exemplars` is set.
        """
        added = {**self._labels, **(labels or {})}
        text = [
            *_text(self._own, added, hidden_labels, exemplars=exemplars),
            *_text(self._shared, {**added, **self._service}, hidden_labels, exemplars=exemplars),
        ]
        return "".join(text).encode()


class _BuildCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        release = own_release()
        yield single(process.BUILD_INFO, 1, release.version, str(release.protocol))


def number_text(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def wants_open_metrics(accept: str) -> bool:
    """Whether a scraper's header `Accept` ranks OpenMetrics at least as high as the text format."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for offer in accept.split(","):
        kind, *parameters = (part.strip() for part in offer.split(";"))
        quality = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        if kind in weights and quality.replace(".", "", 1).isdecimal():
            weights[kind] = max(weights[kind], float(quality))
    return weights["application/openmetrics-text"] >= max(weights["text/plain"], 0.001)


def open_metrics(text: bytes) -> bytes:
    """Converts a text in format 0.0.4 with exemplars to OpenMetrics."""
    written = []
    for family in (b"\n" + text).split(b"\n" + _HEADER)[1:]:
        header, kind, samples = _parts(family)
        if kind.endswith(b" counter"):
            kind = kind.removesuffix(b"_total counter") + b" counter"
            name, _, documentation = header.partition(b" ")
            header = name.removesuffix(b"_total") + b" " + documentation
        header = header.replace(b'"', b'\\"')
        written.append(b"%b%b\n%b\n%b" % (_HEADER, header, kind, samples))
    return b"".join(written) + b"# EOF\n"


def is_exposition(text: bytes) -> bool:
    """Whether a text seems to be in format 0.0.4: UTF-8 that begins with the help of a metric."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return not text or (text.startswith(_HEADER) and text.endswith(b"\n"))


def merged(texts: Iterable[bytes]) -> bytes:
    """Merges texts in format 0.0.4. Omits metrics whose type differs from an earlier text."""
    families: dict[bytes, tuple[bytes, list[bytes]]] = {}
    for text in texts:
        for family in (b"\n" + text).split(b"\n" + _HEADER)[1:]:
            header, kind, samples = _parts(family)
            name = header.partition(b" ")[0]
            known = families.setdefault(name, (_HEADER + header + b"\n" + kind + b"\n", []))
            if known[0].endswith(b"\n" + kind + b"\n"):
                known[1].append(samples)
    return b"".join(header + b"".join(samples) for header, samples in families.values())


def _parts(family: bytes) -> tuple[bytes, bytes, bytes]:
    """Splits a metric family into its help (without `# HELP `), its type line, and its samples."""
    header, _, rest = family.partition(b"\n")
    kind, _, samples = rest.partition(b"\n")
    return header, kind, samples if not samples or samples.endswith(b"\n") else samples + b"\n"


def _text(
    collectors: Iterable[Collector],
    added: Mapping[str, str],
    hidden_labels: Collection[str],
    *,
    exemplars: bool,
) -> Iterator[str]:
    for collector in collectors:
        for metric in collector.collect():
            samples = [
                line
                for sample in metric.samples
                if not sample.name.endswith("_created")
                and sample.labels.keys().isdisjoint(hidden_labels)
                and (line := _line(sample, added, exemplars=exemplars)) is not None
            ]
            if samples:
                yield _head(metric)
                yield from samples


def _head(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n"


def _line(sample: Sample, added: Mapping[str, str], *, exemplars: bool) -> str | None:
    """Formats a sample with added labels. None if an added label already has another value."""
    labels = {**added, **sample.labels}
    if any(labels[name] != value for name, value in added.items()):
        return None
    listed = f"{{{_listed(labels)}}}" if labels else ""
    exemplar = _exemplar(sample.exemplar) if exemplars and sample.exemplar else ""
    return f"{sample.name}{listed} {number_text(sample.value)}{exemplar}\n"


def _exemplar(exemplar: Exemplar) -> str:
    text = f" # {{{_listed(exemplar.labels)}}} {number_text(exemplar.value)}"
    return text if exemplar.timestamp is None else f"{text} {float(exemplar.timestamp):.3f}"


def _listed(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
