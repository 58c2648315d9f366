"""Writes the tables of docs/metrics.md from the registry: `python -m tools.metrics_page`.

Each table stands between a line `<!-- metrics: NAME -->` and a line `<!-- end -->`.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.common.telemetry.metric_specs import SPECS, edge, process, replica, shared_state, vllm
from services.common.telemetry.metric_specs.spec import MetricSpec, Source

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
TABLES: dict[str, tuple[MetricSpec, ...]] = {
    "vllm": vllm.SPECS,
    "replica": replica.SPECS,
    "edge": edge.SPECS,
    "shared state": shared_state.SPECS,
    "process": process.SPECS,
}
_PART = re.compile(r"(<!-- metrics: (?P<name>[^>]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def labels(spec: MetricSpec) -> tuple[str, ...]:
    """The labels that a metric has where Prometheus reads it, besides `replica` at a gateway."""
    return tuple(dict.fromkeys((*spec.source.added_labels, *spec.labels)))


def table(specs: Sequence[MetricSpec]) -> str:
    """A table of metrics. Labels and the source that all of them share stand above it."""
    shared = [label for label in labels(specs[0]) if all(label in labels(spec) for spec in specs)]
    source = _source(specs[0]) if len({spec.source for spec in specs}) == 1 else ""
    common = []
    if shared:
        common.append(f"Labels of all: {_named(shared)}.")
    if source:
        common.append(f"Source of all: {source}.")
    names = ["name", "type", "unit", "labels", "meaning", *([] if source else ["source"])]
    lines = [" ".join(common), ""] if common else []
    lines += [_line(names), "|" + "---|" * len(names)]
    for spec in specs:
        own = [label for label in labels(spec) if label not in shared]
        cells = [f"`{spec.served_name}`", spec.kind.value, spec.unit or "-", _named(own) or "-"]
        lines.append(_line([*cells, spec.text, *([] if source else [_source(spec)])]))
    return "\n".join(lines) + "\n"


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _source(spec: MetricSpec) -> str:
    return "every service" if spec.source is Source.EVERY else spec.source.value


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def filled(page: str) -> str:
    """The page with its tables as the registry has them. Raises KeyError for an unknown table."""
    return _PART.sub(lambda part: part[1] + table(TABLES[part["name"]]), page)


if __name__ == "__main__":
    assert sum(map(len, TABLES.values())) == len(SPECS)
    PAGE.write_text(filled(PAGE.read_text()))
