"""The queries of the dashboards, with the colours that Grafana gives to their values."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
VARIABLE = re.compile(r"\$(?!__)(\w+)")


@dataclass(frozen=True)
class Query:
    """A query of a panel. `alerts` are the alerts whose sections of the runbook the panel links to.

    `steps` are the panel's thresholds: pairs of a value and the colour from this value on. The
    first value is None.
    """

    dashboard: str
    panel: str
    expr: str
    is_exemplar: bool
    alerts: tuple[str, ...]
    steps: tuple[tuple[float | None, str], ...]

    def filled(self, interval: str) -> str:
        """The query for all namespaces, models and replicas."""
        return filled(self.expr.replace("$__rate_interval", interval))

    def color(self, value: float) -> str:
        return [color for bound, color in self.steps if bound is None or value >= bound][-1]

    @property
    def bound(self) -> float:
        """The value at which the colour changes."""
        (first, _), (bound, _) = self.steps
        assert first is None
        assert bound is not None
        return bound

    @property
    def is_red_below(self) -> bool:
        return self.steps[0][1] == "red"

    def is_red(self, values: list[float]) -> bool:
        return any(self.color(value) == "red" for value in values)


def filled(expr: str) -> str:
    """A query for all namespaces, models and replicas."""
    return VARIABLE.sub(".*", expr.replace("$top", "5"))


def annotations_of(path: Path) -> list[dict[str, Any]]:
    annotations: list[dict[str, Any]] = json.loads(path.read_text())["annotations"]["list"]
    return annotations


def panels_of(path: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, without rows."""
    panels = json.loads(path.read_text())["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def _steps(panel: dict[str, Any], ref_id: str) -> tuple[tuple[float | None, str], ...]:
    """The thresholds of a query: the thresholds of its table column, or else of the panel."""
    found = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == f"Value #{ref_id}":
            for changed in override["properties"]:
                if changed["id"] == "thresholds":
                    found = changed["value"]
    return tuple((step["value"], step["color"]) for step in found["steps"])


QUERIES = [
    Query(
        path.stem,
        panel["title"],
        target["expr"],
        target.get("exemplar", False),
        tuple(link["title"] for link in panel.get("links", ())),
        _steps(panel, target["refId"]),
    )
    for path in DASHBOARDS
    for panel in panels_of(path)
    for target in panel["targets"]
]
HEALTH = [query for query in QUERIES if query.dashboard == "stepwell-health" and query.steps]
"""The panels of which there is one for each alert."""
