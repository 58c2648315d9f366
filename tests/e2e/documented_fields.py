"""The fields of requests, read from Pydantic classes and protobuf messages, and the fields'
examples in documented_fields.md.
"""

import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor
from pydantic import BaseModel

_BASE = r"^Added to `(\{.*\})`"
_ROW = r"^\| `([\w.]+)` \| `(\{.*\})` \|"
PAGE = Path(__file__).parent / "documented_fields.md"


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a request field: its path, and the values added to the base request."""

    call: str
    field: str
    base: dict[str, Any]
    added: dict[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        return _merged(self.base, self.added)

    @property
    def has_field(self) -> bool:
        return _has(self.added, self.field.split("."))


def examples() -> dict[str, list[Example]]:
    """The examples of documented_fields.md. Maps a call (an HTTP method and route, or a method of
    `Inference`) to its examples. One section of the page names no base request: its fields are
    added to the requests of /v1/completions and of /v1/chat/completions.
    """
    found: dict[str, list[Example]] = {}
    shared: list[tuple[str, str]] = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        call, rows = heading.strip("`"), re.findall(_ROW, text, re.MULTILINE)
        base = re.search(_BASE, text, re.MULTILINE)
        if base is None:
            shared = rows
            continue
        if call.endswith("/completions"):
            rows += shared
        found[call] = [
            Example(call, field, json.loads(base[1]), json.loads(added)) for field, added in rows
        ]
    return found


def fields_of_body(body: type[BaseModel]) -> Iterator[str]:
    """Yields the paths of a body's fields, such as `stream_options.include_usage`."""
    for attribute, field in body.model_fields.items():
        name = field.alias or attribute
        yield name
        for part in _bodies_in(field.annotation):
            yield from (f"{name}.{inner}" for inner in fields_of_body(part))


def fields_of_message(message: Descriptor) -> Iterator[str]:
    """Yields the paths of a protobuf message's fields, with dots between nested names."""
    for field in message.fields:
        yield field.name
        if field.message_type is not None:
            inner = fields_of_message(field.message_type)
            yield from (f"{field.name}.{name}" for name in inner)


def _bodies_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        if not isinstance(part, str):
            yield from _bodies_in(part)


def _merged(base: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    both = {name: base[name] for name in base if name not in added}
    for name, value in added.items():
        is_part = isinstance(value, dict) and isinstance(base.get(name), dict)
        both[name] = _merged(base[name], value) if is_part else value
    return both


def _has(value: Any, path: list[str]) -> bool:
    if not path:
        return True
    if isinstance(value, list):
        return any(_has(item, path) for item in value)
    return isinstance(value, dict) and path[0] in value and _has(value[path[0]], path[1:])
