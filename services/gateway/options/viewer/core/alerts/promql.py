"""Parses the part of PromQL that Stepwell's rules use. An expression becomes a function that
computes its value from a SeriesStore.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from services.gateway.options.viewer.core.alerts.functions import (
    AGGREGATIONS,
    ARITHMETIC,
    COMPARISONS,
    OVER_TIME,
    histogram_quantile,
)
from services.gateway.options.viewer.core.alerts.series_store import (
    Accepts,
    Labels,
    SeriesStore,
    Vector,
)

Node = Callable[[SeriesStore], Vector]
Key = Callable[[Labels], Labels]
_TOKEN = re.compile(
    r'\d+(?:\.\d+)?|[a-zA-Z_:][\w:]*|"[^"\\]*"|[=!]~|[=!<>]=|[-+*/<>=(){},\[\]]|#.*|\S'
)
_LEVELS: tuple[Collection[str], ...] = (
    ("or",),
    ("and", "unless"),
    COMPARISONS,
    ("+", "-"),
    ("*", "/"),
)
"""The binary operators, from the weakest to the strongest."""
_SCALAR: Labels = frozenset([("", "scalar")])
"""The labels of a number, which no series has."""


class NotSupported(ValueError):
    """The expression uses a part of PromQL that is not implemented here."""


@dataclass(frozen=True, slots=True)
class Expression:
    evaluate: Node
    keep_seconds: dict[str, float]
    """Maps the name of each metric in the expression to the longest range of its samples."""


def parse(text: str) -> Expression:
    """Raises NotSupported."""
    parser = _Parser([token for token in _TOKEN.findall(text) if token[0] != "#"])
    node = parser.operation()
    if parser.token:
        raise NotSupported(f"{parser.token!r} in {text!r}")
    return Expression(node, parser.keep_seconds)


def duration(text: str) -> float:
    """Returns the seconds of a duration such as 1h30m. Raises NotSupported."""
    if not re.fullmatch(r"(\d+[smhd])+", text):
        raise NotSupported(f"the duration {text!r}")
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(int(number) * seconds[unit] for number, unit in re.findall(r"(\d+)(.)", text))


@dataclass(slots=True)
class _Parser:
    """A recursive-descent parser. `token` is the next token, or empty at the end."""

    tokens: list[str]
    keep_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def token(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, expected: str = "") -> str:
        token = self.token
        if not token or (expected and token != expected):
            raise NotSupported(f"{token!r} instead of {expected or 'a value'!r}")
        return self.tokens.pop(0)

    def until(self, end: str) -> list[str]:
        found = []
        while self.token != end:
            found.append(self.take())
        self.take()
        return found

    def operation(self, level: int = 0) -> Node:
        if level == len(_LEVELS):
            return self.value()
        left = self.operation(level + 1)
        while self.token in _LEVELS[level]:
            name, key = self.take(), self.grouping("on", "ignoring") or (lambda labels: labels)
            left = _operation(name, left, self.operation(level + 1), key)
        return left

    def value(self) -> Node:
        token = self.take()
        if token == "(":
            return self.inner()
        if token[0].isdigit():
            number = {_SCALAR: float(token)}
            return lambda _: number
        if token in AGGREGATIONS:
            key = self.grouping("by", "without")
            self.take("(")
            inner = self.inner()
            return _aggregation(token, inner, key or self.grouping("by", "without"))
        if token in OVER_TIME:
            return self.over_time(token)
        if token == "histogram_quantile":
            self.take("(")
            quantile = float(self.take())
            self.take(",")
            buckets = self.inner()
            return lambda store: histogram_quantile(quantile, buckets(store))
        accepts = self.matchers(token)
        self.keep_seconds.setdefault(token, 0.0)
        return lambda store: store.vector(token, accepts)

    def inner(self) -> Node:
        node = self.operation()
        self.take(")")
        return node

    def over_time(self, name: str) -> Node:
        self.take("(")
        metric = self.take()
        accepts = self.matchers(metric)
        self.take("[")
        seconds = duration("".join(self.until("]")))
        self.take(")")
        self.keep_seconds[metric] = max(seconds, self.keep_seconds.get(metric, 0.0))
        compute = OVER_TIME[name]

        def evaluate(store: SeriesStore) -> Vector:
            began, windows = store.now - seconds, store.windows(metric, seconds, accepts)
            computed = {one: compute(*both, began, store.now) for one, both in windows.items()}
            return {labels: value for labels, value in computed.items() if value is not None}

        return evaluate

    def grouping(self, keeping: str, dropping: str) -> Key | None:
        """Parses a list of labels after a keyword, if the keyword comes next."""
        if self.token not in (keeping, dropping):
            return None
        keeps = self.take() == keeping
        self.take("(")
        names = set(self.until(")")) - {","}
        return lambda labels: frozenset(one for one in labels if (one[0] in names) == keeps)

    def matchers(self, metric: str) -> Accepts:
        """Parses the matchers of labels after a metric's name."""
        if not re.match(r"[a-zA-Z_:]", metric) or self.token == "(":
            raise NotSupported(f"{metric}{self.token}")
        if self.token != "{":
            return lambda _: True
        self.take()
        written = [token for token in self.until("}") if token != ","]
        each = [_matcher(*written[at : at + 3]) for at in range(0, len(written), 3)]

        def accepts(labels: Labels) -> bool:
            values = dict(labels)
            return all(matches(values) for matches in each)

        return accepts


def _matcher(label: str, sign: str = "", text: str = "") -> Callable[[dict[str, str]], bool]:
    if sign not in ("=", "!=", "=~", "!~"):
        raise NotSupported(f"the matcher {label}{sign}{text}")
    pattern = re.compile(text[1:-1] if sign[-1] == "~" else re.escape(text[1:-1]))
    return lambda values: bool(pattern.fullmatch(values.get(label, ""))) == (sign[0] == "=")


def _aggregation(name: str, node: Node, key: Key | None) -> Node:
    def evaluate(store: SeriesStore) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in node(store).items():
            groups.setdefault(key(labels) if key else frozenset(), []).append(value)
        return {labels: AGGREGATIONS[name](values) for labels, values in groups.items()}

    return evaluate


def _operation(name: str, left: Node, right: Node, key: Key) -> Node:
    def evaluate(store: SeriesStore) -> Vector:
        ours, theirs = left(store), right(store)
        if name == "or":
            keys = set(map(key, ours))
            return ours | {one: value for one, value in theirs.items() if key(one) not in keys}
        if name in ("and", "unless"):
            keys = set(map(key, theirs))
            return {one: v for one, v in ours.items() if (key(one) in keys) == (name == "and")}
        pairs = _pairs(ours, theirs, key)
        if name in ARITHMETIC:
            return {labels: ARITHMETIC[name](one, other) for labels, one, other in pairs}
        compare, of_theirs = COMPARISONS[name], _SCALAR in ours
        return {
            labels: other if of_theirs else one
            for labels, one, other in pairs
            if compare(one, other)
        }

    return evaluate


def _pairs(ours: Vector, theirs: Vector, key: Key) -> list[tuple[Labels, float, float]]:
    """Returns the labels of each result of an operator, with the values on both sides."""
    if _SCALAR in theirs:
        return [(labels, value, theirs[_SCALAR]) for labels, value in ours.items()]
    if _SCALAR in ours:
        return [(labels, ours[_SCALAR], value) for labels, value in theirs.items()]
    others = {key(labels): value for labels, value in theirs.items()}
    matched = ((key(labels), value) for labels, value in ours.items())
    return [(labels, value, others[labels]) for labels, value in matched if labels in others]
