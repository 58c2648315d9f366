"""What values of arguments are, by the schemas of the tools, where a format writes plain text."""

import json
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's parameters, by the tool's name."""

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_MAX_ALTERNATIVES = 64


def typed_value(schemas: Schemas, tool: str, key: str, text: str) -> str:
    """The JSON of a value that is written as plain text: of the first type that its schema names
    and the text is one of, else a string.
    """
    properties = schemas.get(tool, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    value = text.strip()
    value = _PYTHON_NAMES.get(value, value)
    for name in types_of(schema):
        if name in _TYPES and _is_of(value, name):
            return value
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: object) -> list[str]:
    """The types that a schema names, and its alternatives."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        names = [name for name in declared if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        alternatives = schema.get(union)
        if isinstance(alternatives, list):
            for one in alternatives[:_MAX_ALTERNATIVES]:
                kind = one.get("type") if isinstance(one, Mapping) else None
                names += [kind] if isinstance(kind, str) else []
    return names


def _is_of(text: str, name: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    is_wrong_bool = isinstance(value, bool) and name != "boolean"
    is_finite = value not in (float("inf"), float("-inf")) and value == value  # noqa: PLR0124
    return isinstance(value, _TYPES[name]) and not is_wrong_bool and is_finite
