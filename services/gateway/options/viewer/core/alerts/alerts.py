"""Alert rules, and the alerts of the last hour."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.options.viewer.core.alerts.promql import (
    Expression,
    NotSupported,
    duration,
    parse,
)
from services.gateway.options.viewer.core.alerts.series_store import Labels, SeriesStore

LISTED_SECONDS = 3600.0
MAX_PAST = 200
_FILLED_IN = re.compile(r"\{\{\s*\$(?:labels\.(\w+)|value)(?:\s*\|\s*(\w+))?\s*\}\}")


@dataclass(frozen=True, slots=True)
class AlertRule:
    name: str
    expression: Expression
    for_seconds: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(slots=True)
class Alert:
    """A rule that is true for one set of labels. Times are in seconds since 1970."""

    rule: AlertRule
    labels: Mapping[str, str]
    since: float
    """When the rule's expression became true."""
    value: float = math.nan
    fired: float | None = None
    ended: float | None = None

    def text(self, annotation: str) -> str:
        """Returns an annotation, with labels and value filled in."""

        def fill(match: re.Match[str]) -> str:
            label, form = match.groups()
            return self.labels.get(label, "") if label else readable(self.value, form)

        return _FILLED_IN.sub(fill, self.rule.annotations.get(annotation, ""))


@dataclass(slots=True)
class Rules:
    """The rules of Prometheus' rule files."""

    alerts: list[AlertRule] = field(default_factory=list)
    recorded: dict[str, Expression] = field(default_factory=dict)
    not_supported: list[str] = field(default_factory=list)
    """The alerts whose expressions cannot be evaluated here."""

    @classmethod
    def of(cls, files: Iterable[Mapping[str, Any]]) -> "Rules":
        """Reads the contents of rule files. Recorded series that no alert reads are omitted."""
        rules = cls()
        written = [rule for one in files for group in one["groups"] for rule in group["rules"]]
        records = {one["record"]: _parsed(one["expr"]) for one in written if "record" in one}
        for rule in (one for one in written if "alert" in one):
            expression = _parsed(rule["expr"])
            read = {} if expression is None else expression.keep_seconds
            recorded = {name: records[name] for name in read if name in records}
            needed = {name: one for name, one in recorded.items() if one is not None}
            if expression is None or len(needed) < len(recorded):
                rules.not_supported.append(rule["alert"])
                continue
            rules.recorded |= needed
            rules.alerts.append(
                AlertRule(
                    rule["alert"],
                    expression,
                    duration(rule.get("for", "0s")),
                    rule.get("labels", {}),
                    rule.get("annotations", {}),
                )
            )
        return rules

    @property
    def keep_seconds(self) -> dict[str, float]:
        """Maps the name of each metric that the rules read to the longest range of its samples."""
        longest: dict[str, float] = {}
        for expression in (*(rule.expression for rule in self.alerts), *self.recorded.values()):
            for name, seconds in expression.keep_seconds.items():
                longest[name] = max(seconds, longest.get(name, 0.0))
        return longest


def _parsed(text: str) -> Expression | None:
    try:
        return parse(text)
    except NotSupported:
        return None


class Alerts:
    """The alerts that fire, and those that ended in the last hour."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._true: dict[tuple[str, Labels], Alert] = {}
        self._past: deque[Alert] = deque(maxlen=MAX_PAST)

    def evaluate(self, store: SeriesStore) -> None:
        """Evaluates all rules at the time of the store's current sampling."""
        for name, expression in self._rules.recorded.items():
            for labels, value in expression.evaluate(store).items():
                store.add(name, labels, value)
        true = dict(self._judged(store))
        for key, alert in self._true.items():
            if key not in true and alert.fired is not None:
                alert.ended = store.now
                self._past.append(alert)
        self._true = true

    def listed(self, now: float) -> Sequence[Alert]:
        """Returns the firing alerts, then those that ended in the last hour, the newest first."""
        firing = [alert for alert in self._true.values() if alert.fired is not None]
        past = [one for one in self._past if (one.ended or 0.0) >= now - LISTED_SECONDS]
        return (
            *sorted(firing, key=lambda alert: -(alert.fired or 0.0)),
            *sorted(past, key=lambda alert: -(alert.ended or 0.0)),
        )

    def _judged(self, store: SeriesStore) -> Iterator[tuple[tuple[str, Labels], Alert]]:
        for rule in self._rules.alerts:
            for labels, value in rule.expression.evaluate(store).items():
                key = (rule.name, labels)
                alert = self._true.get(key) or Alert(rule, dict(labels), store.now)
                alert.value = value
                if alert.fired is None and store.now - alert.since >= rule.for_seconds:
                    alert.fired = store.now
                yield key, alert


def readable(value: float, form: str | None) -> str:
    """Formats a value as Prometheus' template functions do, with less precision."""
    if not math.isfinite(value):
        return str(value)
    if form == "humanizePercentage":
        return f"{100 * value:.3g} %"
    if form == "humanizeDuration":
        return _duration(value)
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts = []
    for unit, long in (("d", 86400), ("h", 3600), ("min", 60)):
        number, seconds = divmod(seconds, long)
        parts += [f"{number:.0f} {unit}"] if number else []
    return " ".join(parts[:2])
