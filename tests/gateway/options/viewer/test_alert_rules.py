"""The alert rules, evaluated by the gateway. promtool judges the same series in test_rules.py."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from services.gateway.options.viewer.core.alerts.alerts import Alerts, Rules
from services.gateway.options.viewer.core.alerts.promql import NotSupported, parse
from services.gateway.options.viewer.core.alerts.series_store import SeriesStore
from tests.deploy.prometheus.rule_stories import STORIES

RULES = Path(__file__).parents[4] / "deploy" / "prometheus" / "rules"
SAMPLES_PER_MINUTE = 3


@cache
def rules() -> Rules:
    return Rules.of(yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml")))


def values_of(notation: str) -> Iterator[float | None]:
    """The values that promtool's notation means: `a+bxn` is a, a+b, …, a+nb, and `_xn` n times no
    value.
    """
    for part in notation.split():
        if part.startswith("_"):
            yield from [None] * int(part.partition("x")[2] or 1)
            continue
        first, step, count = re.fullmatch(r"([\d.]+)(?:\+([\d.]+))?(?:x(\d+))?", part).groups()
        for number in range(int(count or 0) + 1):
            yield float(first) + number * float(step or 0)


def labels_of(series: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return series.partition("{")[0], frozenset(re.findall(r'(\w+)="([^"]*)"', series))


def firing(series: dict[str, str], minute: int) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """The alerts that fire at a minute, if the values of a series change at each full minute."""
    read = rules()
    store, alerts = SeriesStore(read.keep_seconds), Alerts(read)
    values = {labels_of(name): list(values_of(text)) for name, text in series.items()}
    for at in range(minute * SAMPLES_PER_MINUTE + 1):
        store.begin(1_000_000 + at * 60 / SAMPLES_PER_MINUTE)
        for (name, labels), each in values.items():
            value = dict(enumerate(each)).get(at // SAMPLES_PER_MINUTE)
            if value is not None and name in store.keep_seconds:
                store.add(name, labels, value)
        alerts.evaluate(store)
        store.end()
    listed = alerts.listed(store.now)
    return {(one.rule.name, frozenset(one.labels.items())) for one in listed if one.ended is None}


def test_all_rules_can_be_evaluated() -> None:
    assert rules().not_supported == []
    assert {rule.name for rule in rules().alerts} == set(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_an_alert_fires_where_promtool_says_that_it_fires(name: str) -> None:
    story = STORIES[name]
    expected = (name, frozenset(story.fires.items()))
    for series in (story.broken, story.also_broken):
        if series:
            assert expected in firing(series, story.minute)
    assert name not in {alert for alert, _ in firing(story.calm, story.minute)}


def test_counters_grow_by_what_they_had_before_the_period() -> None:
    """One counter grows by 10 in each 20 s. Another one begins with 5, 20 s ago."""
    store = SeriesStore({"a": 3600.0})
    for at in range(10):
        store.begin(1000.0 + 20 * at)
        store.add("a", frozenset([("x", "1")]), 7 + 10.0 * at)
        if at >= 8:
            store.add("a", frozenset([("x", "2")]), 5.0 + at - 8)
        store.end()
    assert store.gained("a", 60.0) == {
        frozenset([("x", "1")]): 30.0,
        frozenset([("x", "2")]): 6.0,
    }
    assert store.gained("a", 3600.0)[frozenset([("x", "1")])] == 97.0
    assert [len(times) for times, _ in store.windows("a", 60.0).values()] == [3, 2]


SERIES = {
    'a_total{x="1",y="p"}': "3+7x12 2+5x12",  # with a restart
    'a_total{x="1",y="q"}': "0x9 4x9 6x9",
    'a_total{x="2",y="p"}': "0+60x24",
    'h_bucket{le="0.5"}': "0+3x24",
    'h_bucket{le="2.0"}': "0+10x24",
    'h_bucket{le="+Inf"}': "0+12x24",
}
EXPRESSIONS = (
    'rate(a_total{x="2"}[5m])',
    'increase(a_total{y=~"p|r",x!="2"}[15m])',
    'sum without (y) (increase(a_total{x="1"}[8m])) / 2 + 1 - 3 * 0.5',
    'sum by (x) (rate(a_total{x="1"}[5m])) / ignoring (y) rate(a_total{y="q"}[9m])',
    'changes(a_total{y="q"}[20m]) unless changes(a_total[20m]) > 9 or rate(a_total{y="q"}[1m])',
    'max(max_over_time(a_total{y!~"q"}[10m]))',
    '3 < changes(a_total{x="2"}[20m])',
    "histogram_quantile(0.7, rate(h_bucket[5m]))",
    "histogram_quantile(0.99, sum by (le) (rate(h_bucket[5m])))",
)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_expressions_have_the_values_that_promtool_computes(tmp_path: Path) -> None:
    """promtool subtracts the value that the gateway computed, and the difference must be tiny."""
    parsed = [parse(text) for text in EXPRESSIONS]
    store = SeriesStore({"a_total": 1800.0, "h_bucket": 1800.0})
    values = {labels_of(name): list(values_of(text)) for name, text in SERIES.items()}
    for minute in range(23):
        store.begin(minute * 60.0)
        for (name, labels), each in values.items():
            store.add(name, labels, each[minute])
    store.begin(22 * 60 + 20.0)
    judged = []
    for text, expression in zip(EXPRESSIONS, parsed, strict=True):
        ((labels, value),) = expression.evaluate(store).items()
        sample = "{" + ",".join(f'{name}="{label}"' for name, label in sorted(labels)) + "}"
        judged.append(
            {
                "expr": f"abs(({text}) - {value!r}) < bool 1e-9",
                "eval_time": "22m20s",
                "exp_samples": [{"labels": sample, "value": 1}],
            }
        )
    series = [{"series": name, "values": text} for name, text in SERIES.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": judged}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text", ["absent(up)", "a offset 5m", "a * on (x) group_left b", "rate(a[5m:1m])", "a >", "(a"]
)
def test_a_rule_of_another_kind_is_named_as_left_out(text: str) -> None:
    with pytest.raises(NotSupported):
        parse(text)
    written = [
        {"record": "r", "expr": text},
        {"alert": "Other", "expr": text},
        {"alert": "OfOther", "expr": "r > 1"},
    ]
    assert Rules.of([{"groups": [{"rules": written}]}]).not_supported == ["Other", "OfOther"]
