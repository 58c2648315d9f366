"""Argument types of the flags of `stepwell bench`. Each raises ArgumentTypeError."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from services.cli.bench.core.lengths import Range
from services.cli.bench.core.rate import RequestRate
from services.cli.bench.core.summary import parse_objective

T = TypeVar("T")


def _checked(
    convert: Callable[[str], T], is_right: Callable[[T], bool], words: str
) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value: T | None
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_right(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
        return value

    return parse


def _explained(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps a parser so that its ValueError becomes an ArgumentTypeError with the same sentence."""

    def explained(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return explained


def _strict_json(text: str) -> Any:
    """Parses JSON without NaN and infinity, which other programs cannot read."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


count = _checked(int, lambda value: value >= 1, "a whole number of at least 1")
count_or_zero = _checked(int, lambda value: value >= 0, "a whole number of at least 0")
above_zero = _checked(float, lambda value: 0 < value < math.inf, "a number above 0")
above_zero_or_inf = _checked(float, lambda value: value > 0, "a number above 0, or inf")
json_object: Callable[[str], dict[str, Any]] = _checked(
    _strict_json, lambda value: isinstance(value, dict), "a JSON object"
)
number_range = _explained(Range.parse)
objective = _explained(parse_objective)


def request_rate(text: str) -> str:
    """Checks that the text of a request rate can be parsed, and returns the text."""
    _explained(RequestRate.parse)(text)
    return text


def header(text: str) -> tuple[str, str]:
    """Splits `NAME: VALUE` into a header's name and value."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be a name, a colon and a value, not {text!r}")
    return name.strip(), value.strip()
