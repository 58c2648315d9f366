"""Dashboards are well formed, and have the thresholds of the alerts."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.prometheus.dashboards import (
    DASHBOARDS,
    HEALTH,
    QUERIES,
    VARIABLE,
    Query,
    annotations_of,
    panels_of,
)
from tests.deploy.prometheus.test_rules import ALERTS, RUNBOOK_URL, SERIES, series_in

DEPLOY = Path(__file__).parents[3] / "deploy"
PROVISIONED = DEPLOY / "compose" / "grafana" / "datasources"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COMPARED = re.compile(r"(?:[<>]=?|==) (\d[\d.]*(?: \* \d+)?)")


def bounds_of(alert: str) -> set[float]:
    """The values that separate a firing from a calm state. For counts it is 1, not 0."""
    written = {
        math.prod(float(factor) for factor in number.split(" * "))
        for number in _COMPARED.findall(ALERTS[alert]["expr"])
    }
    return {bound or 1 for bound in written} or {1}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_formed_and_read_metrics_that_there_are(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == path.stem
    assert "__inputs" not in dashboard
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    for x, y, width, height in places:
        assert x + width <= 24
        assert not any(
            (x, y) != (a, b) and x < a + w and a < x + width and y < b + h and b < y + height
            for a, b, w, h in places
        ), "panels overlap"
    annotations = annotations_of(path)
    assert [one["name"] for one in annotations] == ["Alerts", "Starts"]
    for panel in panels_of(path):
        assert panel["datasource"] == SOURCE
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            assert series_in(target["expr"]), panel["title"]
            assert series_in(target["expr"]) <= SERIES, panel["title"]
    for one in annotations:
        assert one["datasource"] == SOURCE
        assert series_in(one["expr"]) <= SERIES


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_is_defined_and_used(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert {"datasource", "namespace", "model_name"} <= set(variables)
    exprs = [target["expr"] for panel in panels_of(path) for target in panel["targets"]]
    used = {name for expr in exprs for name in VARIABLE.findall(expr)}
    assert used == set(variables) - {"datasource", "runbook"}
    for expr in exprs:
        for selector in re.findall(r"\{(.*?)\}", expr):
            assert "$namespace" in selector or "state=" in selector or "alertname" in selector
    for name in used - {"top"}:
        assert variables[name]["datasource"] == SOURCE
        assert series_in(variables[name]["query"]["query"]) <= SERIES
        assert variables[name]["allValue"] == ".*"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_links_lead_to_the_sections_of_the_alerts(path: Path) -> None:
    (runbook,) = [
        variable
        for variable in json.loads(path.read_text())["templating"]["list"]
        if variable["name"] == "runbook"
    ]
    assert runbook["query"] == runbook["current"]["value"] == RUNBOOK_URL
    for panel in panels_of(path):
        for link in panel.get("links", ()):
            assert link["title"] in ALERTS
            assert link["url"] == f"${{runbook}}#{link['title'].lower()}"


@pytest.mark.parametrize(
    "query",
    [query for query in QUERIES if query.steps],
    ids=lambda query: f"{query.dashboard}: {query.panel}",
)
def test_a_panel_turns_red_at_the_number_of_its_alert(query: Query) -> None:
    (alert,) = query.alerts
    assert bounds_of(alert) == {query.bound}
    assert {color for _, color in query.steps} == {"red", "green"}


def test_every_alert_has_a_panel() -> None:
    assert sorted({query.alerts for query in HEALTH}) == sorted((alert,) for alert in ALERTS)


def test_the_data_source_has_the_interval_of_scrapes_and_leads_from_exemplars_to_traces() -> None:
    (path,) = PROVISIONED.glob("*.yaml")
    sources = {one["uid"]: one for one in yaml.safe_load(path.read_text())["datasources"]}
    provided = sources["prometheus"]["jsonData"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert provided["timeInterval"] == config["global"]["scrape_interval"]
    (target,) = provided["exemplarTraceIdDestinations"]
    assert target["name"] == "trace_id"
    assert sources[target["datasourceUid"]]["type"] == "jaeger"
    assert [query.panel for query in QUERIES if query.is_exemplar]
