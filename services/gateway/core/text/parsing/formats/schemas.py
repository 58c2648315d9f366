"""Converts argument values to JSON, for formats in which models write values as plain text. The
tools' schemas determine the values' types.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.common.request.schema_checks import find_ref

Schemas = Mapping[str, Mapping[str, Any]]
"""Maps the names of tools to the JSON schemas of their parameters."""

_IMPLIED: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "patternProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "multipleOf", "exclusiveMinimum"}),
}
"""Maps each type to the schema keywords that imply it. A schema without `type` that has one of
these keywords allows only the implied type.
"""
_ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_MAX_SCHEMAS = 256
"""Limit on the number of schemas that are visited for one value."""
_MAX_LITERAL_CHARACTERS = 65_536


def typed_value(schemas: Schemas, tool: str, key: str, text: str) -> str:
    """Converts the value of the tool's parameter `key` from plain text to JSON. If the text can be
    read as a value of a type that the parameter's schema allows, returns this value. Otherwise, or
    if the parameter has no schema, returns the text as a JSON string.

    References, alternatives and enumerations of the schema are evaluated. If the schema allows
    strings and other types, the other types are preferred, unless an enumeration contains the text
    as a string.
    """
    root = schemas.get(tool, {})
    found = _Schema(root)
    declared = found.of_property(root, key)
    if declared is None:
        return json.dumps(text, ensure_ascii=False)
    literals = list(found.literals(declared))
    if text in literals:
        return json.dumps(text, ensure_ascii=False)
    types = found.types(declared)
    for value, written in _readings(text.strip(), types):
        if any(value == one and type(value) is type(one) for one in literals):
            return written
        if _types_of(value) & types:
            return str(int(value)) if _is_whole(value, types) else written
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    return _json(text) is not None or text.strip() == "null"


class _Schema:
    """The schema of one tool. At most _MAX_SCHEMAS subschemas are visited, and references from a
    schema to itself are ignored, so that every evaluation ends.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def of_property(self, schema: object, key: str) -> dict[str, Any] | None:
        """Returns the schema of an object's property, or None if the property has no schema."""
        found: list[object] = []
        others: list[object] = []
        for one in self._all(schema, set()):
            properties, other = one.get("properties"), one.get("additionalProperties")
            if isinstance(properties, Mapping) and key in properties:
                found.append(properties[key])
            elif isinstance(other, Mapping):
                others.append(other)
        return {"anyOf": found or others} if found or others else None

    def literals(self, schema: object) -> Iterator[object]:
        for one in self._all(schema, set()):
            values = one.get("enum")
            yield from values if isinstance(values, list) else ()
            if "const" in one:
                yield one["const"]

    def types(self, schema: object) -> frozenset[str]:
        return self._types(schema, frozenset()) or frozenset()

    def _all(self, schema: object, seen: set[int]) -> Iterator[Mapping[str, Any]]:
        """Yields the schema, and all schemas that its references and alternatives lead to."""
        if not isinstance(schema, Mapping) or id(schema) in seen or not self._takes_one():
            return
        seen.add(id(schema))
        yield schema
        parts = [inner for name in ("allOf", "anyOf", "oneOf") for inner in _list(schema, name)]
        for part in (*parts, self._referred(schema)):
            yield from self._all(part, seen)

    def _types(self, schema: object, above: frozenset[int]) -> frozenset[str] | None:
        if id(schema) in above or not self._takes_one():
            return None
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else _ANY
        above |= {id(schema)}
        types = _ANY
        for allowed in self._bounds(schema, above):
            types &= allowed
        if types == _ANY and not any(name in schema for name in ("type", "anyOf", "oneOf")):
            types = _implied(schema)
        return types | {"null"} if schema.get("nullable") is True else types

    def _bounds(self, schema: Mapping[str, Any], above: frozenset[int]) -> Iterator[frozenset[str]]:
        """Yields, for each keyword of a schema, the types that the keyword allows."""
        declared = schema.get("type")
        names = [declared] if isinstance(declared, str) else declared
        if isinstance(names, list):
            known = frozenset(name for name in names if isinstance(name, str)) & _ANY
            yield known | {"integer"} if "number" in known else known
        values = schema.get("enum")
        if isinstance(values, list):
            yield frozenset[str]().union(*map(_types_of, values))
        if "const" in schema:
            yield _types_of(schema["const"])
        for name in ("anyOf", "oneOf"):
            if alternatives := _list(schema, name):
                known_of = [self._types(one, above) for one in alternatives]
                yield frozenset[str]().union(*(one for one in known_of if one is not None))
        for part in (*_list(schema, "allOf"), self._referred(schema)):
            if part is not None and (types := self._types(part, above)) is not None:
                yield types

    def _referred(self, schema: Mapping[str, Any]) -> object:
        ref = schema.get("$ref")
        found = find_ref(self._root, ref) if isinstance(ref, str) else None
        return None if found is None else found[0]

    def _takes_one(self) -> bool:
        self._num_left -= 1
        return self._num_left >= 0


def _list(schema: Mapping[str, Any], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _implied(schema: Mapping[str, Any]) -> frozenset[str]:
    for name, keywords in _IMPLIED.items():
        if keywords & schema.keys():
            return frozenset({name, "integer"} if name == "number" else {name})
    return _ANY


def _types_of(value: object) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
    return frozenset({"object"} if isinstance(value, dict) else {"array"})


def _is_whole(value: object, types: frozenset[str]) -> bool:
    """Whether a float must be written as an integer, since only integers are allowed."""
    return isinstance(value, float) and "number" not in types


def _readings(text: str, types: frozenset[str]) -> Iterator[tuple[Any, str]]:
    """Yields the values, except strings, that a text may represent, each with its JSON. If `types`
    contains no strings, also yields values that are quoted as a JSON string.
    """
    named = _PYTHON_NAMES.get(text, text)
    if "boolean" in types and text.lower() in ("true", "false"):
        named = text.lower()
    value = _json(named)
    if isinstance(value, str) and "string" not in types:
        named = value.strip()
        value = _json(named)
    if value is not None or named == "null":
        if not isinstance(value, str):
            yield value, named
        return
    for read in (_loose, ast.literal_eval):
        try:
            value = read(text) if text[:1] in ("{", "[") else None
            if isinstance(value, dict | list) and len(text) <= _MAX_LITERAL_CHARACTERS:
                yield value, json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _loose(text: str) -> Any:
    return json.loads(text, strict=False)


def _refuse(name: str) -> float:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value
