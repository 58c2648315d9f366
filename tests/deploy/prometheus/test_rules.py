"""Prometheus' rules: promtool tests them, their metrics exist, and the runbook has every alert."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.telemetry.metric_specs.spec import Kind
from tests.deploy.prometheus.dashboards import HEALTH
from tests.deploy.prometheus.rule_stories import CALM_ONLY_BY_DURATION, STORIES, AlertStory
from tools.reference_pages import ALL_SPECS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules"
RUNBOOK = ROOT / "docs" / "failures.md"
RUNBOOK_URL = "http://127.0.0.1:9090/user/failures.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)"
)
_SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.SUMMARY: ("_sum", "_count")}
SERIES = {
    spec.served_name + suffix
    for spec in ALL_SPECS.values()
    for suffix in _SUFFIXES.get(spec.kind, ("",))
} | {"up", "ALERTS", "ALERTS_FOR_STATE"}


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def series_in(query: str) -> set[str]:
    """The names of the metrics in a query."""
    named = re.findall(r"\b((?:vllm:|stepwell[_:]|process_|http_|ALERTS)[\w:]*)|\b(up)\b", query)
    return {name or up for name, up in named}


def promtool(*arguments: str, cwd: Path = ROOT) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", *(str(path) for path in sorted(RULES.glob("*.yml"))))
    promtool("check", "config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))


def test_every_alert_has_a_story_and_a_section_of_the_runbook() -> None:
    sections = dict(
        re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    )
    assert set(ALERTS) == set(STORIES) == set(sections)
    for name, alert in ALERTS.items():
        assert set(alert["labels"]) == {"severity"}
        assert alert["labels"]["severity"] in ("warning", "critical")
        annotations = alert["annotations"]
        assert set(annotations) == {"summary", "description", "runbook_url"}
        assert annotations["runbook_url"] == f"{RUNBOOK_URL}#{name.lower()}"
        for part in ("**Means.**", "**Look at.**", "**Do.**"):
            assert sections[name].count(part) == 1, (name, part)


def test_the_runbook_names_metrics_that_there_are() -> None:
    named = set(re.findall(r"`((?:vllm:|stepwell_)\w+)", RUNBOOK.read_text()))
    assert named
    assert named - SERIES - {spec.served_name for spec in ALL_SPECS.values()} == set()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_read_metrics_that_there_are(rule: dict[str, Any]) -> None:
    assert series_in(rule["expr"])
    assert series_in(rule["expr"]) <= SERIES | RECORDED


def panel_of(name: str) -> str:
    """The name of the rule that fires while the alert's panel of the dashboard "health" is red."""
    return f"{name}Panel"


def panel_rules() -> list[dict[str, Any]]:
    exprs = defaultdict(list)
    for query in HEALTH:
        (alert,) = query.alerts
        aggregate, compared = ("min", "<") if query.is_red_below else ("max", ">=")
        exprs[alert].append(f"{aggregate}({query.filled('5m')}) {compared} {query.bound}")
    return [{"alert": panel_of(name), "expr": " or ".join(own)} for name, own in exprs.items()]


def rule_test(name: str, story: AlertStory, rule_files: list[str]) -> dict[str, Any]:
    """An alert's promtool tests: one for each broken system, and one for the calm system. The rules
    are also evaluated between two samples, which are a minute apart, as with slow scrapes.
    """

    def run(series: dict[str, str], *, fires: bool) -> dict[str, Any]:
        alert = {"exp_labels": story.fires | {"severity": story.severity}}
        is_red = fires or name in CALM_ONLY_BY_DURATION
        expected = {name: [alert] if fires else [], panel_of(name): [{}] if is_red else []}
        return {
            "interval": "1m",
            "input_series": [{"series": key, "values": value} for key, value in series.items()],
            "alert_rule_test": [
                {"eval_time": f"{story.minute}m30s", "alertname": one, "exp_alerts": alerts}
                for one, alerts in expected.items()
            ],
        }

    return {
        "rule_files": rule_files,
        "evaluation_interval": "30s",
        "tests": [
            *(run(series, fires=True) for series in (story.broken, story.also_broken) if series),
            run(story.calm, fires=False),
        ],
    }


@pytest.fixture(scope="module")
def bare_rules(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths of the rule files without annotations, whose texts would contain measured values. A
    further file has the rules of the panels.
    """
    directory = tmp_path_factory.mktemp("rules")
    for path in sorted(RULES.glob("*.yml")):
        written = yaml.safe_load(path.read_text())
        for group in written["groups"]:
            for rule in group["rules"]:
                rule.pop("annotations", None)
        (directory / path.name).write_text(yaml.safe_dump(written))
    panels = {"groups": [{"name": "panels", "rules": panel_rules()}]}
    (directory / "panels.yml").write_text(yaml.safe_dump(panels))
    return [str(path) for path in sorted(directory.glob("*.yml"))]


def test_every_refusal_for_lack_of_capacity_counts_as_one() -> None:
    """The documented refusals with 503 are in the alerts' ratios and on the page /ui."""
    table = (ROOT / "docs" / "scaling.md").read_text().partition("| refusal |")[2]
    reasons = set(re.findall(r"503 `(\w+)`|; `(\w+)` after", table.partition("\n\n")[0]))
    documented = {first or second for first, second in reasons}
    assert len(documented) == 6
    page = (ROOT / "services/gateway/options/viewer/ui/overview.js").read_text()
    ratios = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    for name in ("stepwell:refused_ratio:rate5m", "stepwell:tenant_refused_ratio:rate5m"):
        assert documented <= set(re.split(r'[|"]', ratios[name]))
    assert documented <= set(re.findall(r'"(\w+)"', page))


@needs_promtool
@pytest.mark.parametrize("name", STORIES)
def test_an_alert_fires_and_its_panel_is_red_for_what_it_watches_and_for_nothing_else(
    name: str, bare_rules: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "story.yml"
    path.write_text(yaml.safe_dump(rule_test(name, STORIES[name], bare_rules)))
    promtool("test", "rules", str(path))
