"""The report: sections of facts, as text for people and as JSON for programs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DIRECTORIES = re.compile(r"(?<![\w.~/])~?/(?:[^\s/:'\"]+/)+")


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact's name such as `memory`, its value for programs, and its text for people."""

    name: str
    value: Any
    text: str


Report = Mapping[str, Sequence[Fact]]
"""The facts of each section."""


def text_of(report: Report) -> str:
    lines = []
    for section, facts in report.items():
        lines.append(section)
        for fact in facts:
            first, *others = without_directories(fact.text).splitlines() or [""]
            lines.append(f"  {fact.name.replace('_', ' '):<18}{first}".rstrip())
            lines += [f"  {'':<18}{other}" for other in others]
    return "\n".join(lines)


def json_of(report: Report) -> dict[str, dict[str, Any]]:
    return {
        section: {fact.name: _published(fact.value) for fact in facts}
        for section, facts in report.items()
    }


def without_directories(text: str) -> str:
    """Removes the directories of absolute paths from a text, since they may name people."""
    return _DIRECTORIES.sub("", text)


def _published(value: Any) -> Any:
    if isinstance(value, str):
        return without_directories(value)
    if isinstance(value, dict):
        return {name: _published(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_published(each) for each in value]
    return value
