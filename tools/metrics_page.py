"""Writes the tables of docs/metrics.md from the registry: `python -m tools.metrics_page`.

Each table stands between a line `<!-- metrics: NAME -->` and a line `<!-- end -->`.
"""

import re
from collections.abc import Iterable
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
HEAD = "| name | type | unit | labels | meaning | source |\n|---|---|---|---|---|---|\n"
_PART = re.compile(r"(<!-- metrics: (?P<name>[^>]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def labels(spec: MetricSpec) -> tuple[str, ...]:
    """The labels that a metric has where Prometheus reads it, besides `replica` at a gateway."""
    return tuple(dict.fromkeys((*spec.source.added_labels, *spec.labels)))


def row(spec: MetricSpec) -> str:
    """One line of a table."""
    named = ", ".join(f"`{label}`" for label in labels(spec))
    source = "every service" if spec.source is Source.EVERY else spec.source.value
    return (
        f"| `{spec.served_name}` | {spec.kind.value} | {spec.unit or '-'} | {named or '-'} "
        f"| {spec.text} | {source} |\n"
    )


def table(specs: Iterable[MetricSpec]) -> str:
    """The lines of a table."""
    return HEAD + "".join(map(row, specs))


def filled(page: str) -> str:
    """The page with its tables as the registry has them. Raises KeyError for an unknown table."""
    return _PART.sub(lambda part: part[1] + table(TABLES[part["name"]]), page)


if __name__ == "__main__":
    assert sum(map(len, TABLES.values())) == len(SPECS)
    PAGE.write_text(filled(PAGE.read_text()))
