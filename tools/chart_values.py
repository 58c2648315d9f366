"""The values of the Helm chart as a list, from the comments in its values.yaml."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

VALUES = Path(__file__).parents[1] / "deploy" / "helm" / "stepwell" / "values.yaml"
_COMMENT = re.compile(r" *# ?(.*)")
_PAGE = re.compile(r"\bdocs/(\w+\.md)(#[\w-]+)?")


def chart_values(wrapped: Callable[[str], list[str]]) -> Iterator[str]:
    """Yields the values that are no maps, and then each map under a heading. `wrapped` breaks a
    paragraph or an item of a list into lines. Neighbours without a comment are one item.
    """
    text = VALUES.read_text()
    lines, root = text.splitlines(), yaml.compose(text, yaml.SafeLoader)
    single = [(key.value, key, value) for key, value in root.value if not _is_section(value)]
    yield from _list(single, lines, wrapped)
    for key, value in root.value:
        if _is_section(value):
            yield from ("", f"### {key.value}", "")
            if comment := _comment(key, lines):
                yield from (*wrapped(comment), "")
            yield from _list(_inside(key.value, value), lines, wrapped)


def _list(
    entries: Iterable[tuple[str, Any, Any]],
    lines: list[str],
    wrapped: Callable[[str], list[str]],
) -> Iterator[str]:
    """The lines of a list of values, each given by its path, its key and its value."""
    without: list[str] = []
    for path, key, value in entries:
        comment = _comment(key, lines)
        name = f"`{path}`" + ("" if _is_section(value) else _default(value))
        if not comment:
            without += [] if _is_section(value) else [name]
            continue
        if without:
            yield from wrapped(f"* {', '.join(without)}")
            without = []
        yield from wrapped(f"* {name}: {comment}")
    if without:
        yield from wrapped(f"* {', '.join(without)}")


def _inside(path: str, section: Any) -> Iterator[tuple[str, Any, Any]]:
    """All entries of a map, each map before its own entries."""
    for key, value in section.value:
        inner = f"{path}.{key.value}"
        yield inner, key, value
        if _is_section(value):
            yield from _inside(inner, value)


def _is_section(value: Any) -> bool:
    """Whether the value is a map with a line for each entry."""
    return isinstance(value, yaml.MappingNode) and not value.flow_style


def _default(value: Any) -> str:
    """The default in brackets, or nothing for an empty value."""
    loaded = yaml.safe_load(yaml.serialize(value))
    if loaded in (None, "", [], {}):
        return ""
    return f" (`{loaded if isinstance(loaded, str) else json.dumps(loaded)}`)"


def _comment(key: Any, lines: list[str]) -> str:
    """The comment in the lines above a key."""
    found: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        match = _COMMENT.fullmatch(line)
        if match is None:
            break
        found.insert(0, match[1])
    return _PAGE.sub(r"[\g<0>](../../../docs/\1\2)", " ".join(found))
