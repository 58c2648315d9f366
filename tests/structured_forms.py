"""Structured outputs, each with a check of complete texts that uses no grammar masks, but a JSON
Schema validator, Python's regular expressions, a list, or a hand-written parser.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jsonschema_rs import Draft202012Validator

from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "leaf": {"enum": [True, None, "leaf", 12.5]},
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
            "required": ["left"],
            "additionalProperties": False,
        },
    },
    "$ref": "#/$defs/node",
}
CHOOSE: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"const": 'a "quoted" text'},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        {"type": "string", "format": "date"},
    ]
}


@dataclass(frozen=True)
class Form:
    """A value of `structured_outputs` as clients send it, and the check of a complete text."""

    sent: dict[str, Any]
    wanted: StructuredOutputs
    accepts: Callable[[str], bool]


def of_schema(schema: dict[str, Any]) -> Form:
    validator = Draft202012Validator(schema, validate_formats=True)
    wanted = StructuredOutputs(StructuredOutputsKind.JSON, json.dumps(schema))
    return Form({"json": schema}, wanted, lambda text: validator.is_valid(json.loads(text)))


def of_regex(pattern: str) -> Form:
    wanted = StructuredOutputs(StructuredOutputsKind.REGEX, pattern)
    return Form({"regex": pattern}, wanted, lambda text: bool(re.fullmatch(pattern, text)))


def of_choices(*texts: str) -> Form:
    wanted = StructuredOutputs(StructuredOutputsKind.CHOICE, json.dumps(texts))
    return Form({"choice": list(texts)}, wanted, lambda text: text in texts)


def of_grammar(text: str, accepts: Callable[[str], bool]) -> Form:
    return Form({"grammar": text}, StructuredOutputs(StructuredOutputsKind.GRAMMAR, text), accepts)


def _is_nested(text: str) -> bool:
    half = len(text) // 2
    return text == "(" * half + "x" + ")" * half


FORMS = {
    "person": of_schema(PERSON),
    "tree": of_schema(TREE),
    "choose": of_schema(CHOOSE),
    "phone": of_regex(r"\+[0-9]{2} [0-9]{3}-[0-9]{4}"),
    "words": of_regex(r"([a-z]{2,6} ){2}(end|é😀)"),
    "choices": of_choices("yes", "no", 'a "quoted" é😀\n', "yesterday"),
    "gbnf": of_grammar('root ::= "(" root ")" | "x"', _is_nested),
    "lark": of_grammar('start: "(" start ")" | "x"', _is_nested),
}
