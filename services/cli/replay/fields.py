"""Reads JSON that may have been edited or damaged. Every error names the invalid field."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from services.cli.errors import CommandError

E = TypeVar("E", bound=Enum)
FieldPath = tuple[str | int, ...]

_MAX_SHOWN = 40
LARGEST = 2**31 - 1
"""The default upper bound of integers in logs."""


class FieldError(ValueError):
    """An invalid value. `path` is the value's position in its document."""

    def __init__(self, path: FieldPath, complaint: str) -> None:
        super().__init__(f"{field_name(path)} {complaint}")
        self.path = path


def field_name(path: FieldPath) -> str:
    """Formats a path for people, such as events[3].add.max_tokens."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{_readable(step)}" for step in path]
    return "".join(parts).removeprefix(".") or "the document"


def _readable(name: str) -> str:
    """Formats a member's name. Long or unprintable names are shortened and quoted as in JSON."""
    return name if name.isprintable() and len(name) <= _MAX_SHOWN else json.dumps(name[:_MAX_SHOWN])


@dataclass(frozen=True, slots=True)
class Field:
    """A JSON value and its position in its document (`path`). Methods raise FieldError if the
    value's type or range is wrong.
    """

    value: Any
    path: FieldPath = ()

    def __getitem__(self, name: str) -> "Field":
        self.members()
        if name not in self.value:
            raise FieldError((*self.path, name), "is missing")
        return Field(self.value[name], (*self.path, name))

    def get(self, name: str, default: Any) -> "Field":
        """A member of an object, or `default` if the member is missing."""
        return Field(self.members().get(name, default), (*self.path, name))

    def members(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("must be an object")
        return self.value

    def only(self, names: Collection[str]) -> None:
        """Raises FieldError for the first member whose name is not in `names`."""
        for name in self.members():
            if name not in names:
                raise FieldError((*self.path, name), "is not known")

    def items(self) -> Iterator["Field"]:
        if not isinstance(self.value, list):
            raise self.wrong("must be a list")
        for index, item in enumerate(self.value):
            yield Field(item, (*self.path, index))

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"must be a whole number from {low} to {high}")
        return self.value

    def integers(self, low: int = 0, high: int = LARGEST) -> list[int]:
        values = self.value
        if isinstance(values, list) and all(
            type(value) is int and low <= value <= high for value in values
        ):
            return values
        # Raises FieldError for the first invalid item.
        return [item.integer(low, high) for item in self.items()]

    def number(self, low: float, high: float) -> float:
        if type(self.value) not in (int, float) or not low <= self.value <= high:
            raise self.wrong(f"must be a number from {low:g} to {high:g}")
        return float(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("must be a string")
        try:
            self.value.encode()
        except UnicodeEncodeError:
            raise self.wrong("must be text") from None
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("must be true or false")
        return self.value

    def one_of(self, values: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in values:
            raise self.wrong(f"must be one of {', '.join(values)}")
        return self.value

    def member(self, members: type[E]) -> E:
        """The member of an enum whose value the field has."""
        return members(self.one_of([member.value for member in members]))

    def wrong(self, complaint: str) -> FieldError:
        shown = json.dumps(self.value)
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        return FieldError(self.path, f"{complaint}, not {shown}")


def parse_json(data: bytes, file: Path, line: int = 1) -> Any:
    """Parses a document that begins on line `line` of a file. Raises CommandError with the line."""
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        complaint = "is not UTF-8 text"
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        complaint = f"is not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        complaint = "is not usable: is nested too deep"
    except ValueError as error:
        complaint = f"is not usable: {error}"
    raise CommandError(f"{file} line {line} {complaint}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
