"""Metrics in Prometheus' text format 0.0.4, of one process or put together from several.

It is written here and in this one format whatever a scraper asks for: in OpenMetrics and in version
1.0.0 of the text format client libraries write `vllm_` for `vllm:` unless names may be UTF-8.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HEADER = b"# HELP "


class Exposition:
    """The metrics of one process, read at each call of `render`, from any thread.

    `own` are metrics of the service; `shared` are those that every service has, which get the label
    `service`. The metrics of the process itself are added to them.
    """

    def __init__(
        self,
        service: str,
        own: Iterable[Collector],
        shared: Iterable[Collector] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """All series get `labels`."""
        self._own = tuple(own)
        self._shared = (ProcessCollector(registry=CollectorRegistry()), *shared)
        self._labels = dict(labels or {})
        self._service = {"service": service}

    def render(
        self, labels: Mapping[str, str] | None = None, hidden_labels: Collection[str] = ()
    ) -> bytes:
        """The text. All series get `labels`. Series that have one of them with another value, or
        have any of `hidden_labels`, are left out.
        """
        added = {**self._labels, **(labels or {})}
        text = [
            *_text(self._own, added, hidden_labels),
            *_text(self._shared, {**added, **self._service}, hidden_labels),
        ]
        return "".join(text).encode()


def number_text(value: float) -> str:
    """A number as the format has it."""
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def merged(texts: Iterable[bytes]) -> bytes:
    """The metrics of several texts as one text. A metric that an earlier one has with another type
    is left out.
    """
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
    """What follows `# HELP ` in the first line, the line of the type, and the samples."""
    header, _, rest = family.partition(b"\n")
    kind, _, samples = rest.partition(b"\n")
    return header, kind, samples if not samples or samples.endswith(b"\n") else samples + b"\n"


def _text(
    collectors: Iterable[Collector], added: Mapping[str, str], hidden_labels: Collection[str]
) -> Iterator[str]:
    for collector in collectors:
        for metric in collector.collect():
            samples = [
                line
                for sample in metric.samples
                if not sample.name.endswith("_created")
                and sample.labels.keys().isdisjoint(hidden_labels)
                and (line := _line(sample, added)) is not None
            ]
            if samples:
                yield _head(metric)
                yield from samples


def _head(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n"


def _line(sample: Sample, added: Mapping[str, str]) -> str | None:
    """A sample with the added labels; None if it has one of them with another value."""
    labels = {**added, **sample.labels}
    if any(labels[name] != value for name, value in added.items()):
        return None
    listed = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{sample.name}{f'{{{listed}}}' if listed else ''} {number_text(sample.value)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
