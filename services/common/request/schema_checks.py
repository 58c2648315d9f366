"""Prepares JSON Schemas for llguidance, and rejects those that it accepts but does not enforce."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from services.common.request.structured_outputs import invalid

_MAX_PARTS = 10_000
"""Limit on the schema parts that are examined to find out whether an instance exists. If the limit
is reached, an instance is assumed to exist.
"""
_MAX_TOGETHER = 40_000
"""Limit on the schema parts that are examined to count properties. A part counts once for each
schema that refers to it.
"""
_MAX_DIVISOR = 2**32 // 10
"""Limit on the numbers of 32 bits in which llguidance computes with `multipleOf`."""
_MAX_INDEX_DIGITS = 6
_ALTERNATIVES = ("anyOf", "oneOf")


def held_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema with its references encoded as URIs. Raises InvalidArgument for a schema
    that llguidance would not enforce correctly, because llguidance counts a repeated property name
    several times and follows endless references.
    """
    checks = _Checks(schema)
    try:
        checks.check_counts()
        has_instance = checks.has_instance(schema, frozenset())
    except RecursionError as error:
        raise invalid("json: the references of the schema are nested too deep") from error
    if not has_instance:
        raise invalid(
            "json: no output conforms to the schema, since the schema requires itself endlessly"
        )
    return with_encoded_refs(schema)


class _Checks:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left, self._num_together_left = _MAX_PARTS, _MAX_TOGETHER
        self._targets: dict[str, object] = {}
        self._satisfiable: set[int] = set()
        """The `id()` of schemas of which an instance is known to exist."""

    def check_counts(self) -> None:
        """Raises InvalidArgument if `minProperties` requires more than one property besides those
        in `required`. An output could satisfy such a schema by repeating one name. Also raises it
        if `multipleOf` is too large, and if too many parts refer to the same parts, since checking
        them would take seconds.
        """
        seen, entered = set[int](), set[int]()
        left: list[object] = [self._root]
        while left:
            part = left.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            together = self._together(part)
            _check_count(together)
            _check_divisors(together)
            for one in together:
                if id(one) not in entered:
                    entered.add(id(one))
                    left += _inside(one)

    def has_instance(self, schema: object, above: frozenset[int]) -> bool:
        """Whether a finite instance of the schema exists. `above` has the `id()` of each enclosing
        schema. An instance that requires an instance of an enclosing schema would be endless.
        """
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return True
        if id(schema) in self._satisfiable:
            return True
        if id(schema) in above:
            return False
        above |= {id(schema)}
        found = all(self.has_instance(one, above) for one in self._needed(schema)) and all(
            any(self.has_instance(one, above) for one in _list(schema, name))
            for name in _ALTERNATIVES
            if _list(schema, name)
        )
        if found:
            self._satisfiable.add(id(schema))
        return found

    def _needed(self, schema: Mapping[str, Any]) -> Iterator[object]:
        yield from _list(schema, "allOf")
        if (target := self._target(schema)) is not None:
            yield target
        properties = schema.get("properties")
        if schema.get("type") == "object" and isinstance(properties, Mapping):
            yield from (
                properties[name]
                for name in _list(schema, "required")
                if isinstance(name, str) and name in properties
            )
        if schema.get("type") == "array" and _number(schema, "minItems"):
            yield from _list(schema, "prefixItems")[:1] or [schema.get("items")]

    def _together(self, schema: Mapping[str, Any]) -> Collection[Mapping[str, Any]]:
        """The schema, and all schemas that apply to the same value (`allOf` and `$ref`)."""
        found: dict[int, Mapping[str, Any]] = {}
        left: list[object] = [schema]
        while left:
            part = left.pop()
            self._num_together_left -= 1
            if self._num_together_left < 0:
                raise invalid("json: too many parts of the schema refer to the same parts")
            if isinstance(part, Mapping) and id(part) not in found:
                found[id(part)] = part
                left += (*_list(part, "allOf"), self._target(part))
        return found.values()

    def _target(self, schema: Mapping[str, Any]) -> object:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return None
        if ref not in self._targets:
            found = find_ref(self._root, ref)
            self._targets[ref] = None if found is None else found[0]
        return self._targets[ref]


def _check_count(together: Collection[Mapping[str, Any]]) -> None:
    least = max(_number(one, "minProperties") for one in together)
    if least <= 1:
        return
    required = {name for one in together for name in _list(one, "required") if _is_name(name)}
    is_closed = any(one.get("additionalProperties") is False for one in together)
    if any(one.get("patternProperties") for one in together):
        is_closed = False
    if not is_closed and least > len(required) + 1:
        raise invalid(
            f"json: minProperties of {least:g} is not supported where names are free and "
            f"{len(required)} are required: a name that repeats would count again. Name the "
            "properties in required, or lower it"
        )


def _check_divisors(together: Collection[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument if llguidance would compute a wrong least common multiple of the
    schemas' divisors, or a wrong remainder.
    """
    numbers = [_number(one, "multipleOf") for one in together]
    divisors = [_decimal(number) for number in numbers if 0 < number < math.inf]
    places = max([0, *(-int(one.as_tuple().exponent) for one in divisors)])
    product = 1
    for one in divisors:
        is_too_large = one > _MAX_DIVISOR
        if not is_too_large:
            product *= int(one.scaleb(places))
            is_too_large = product > 1 and max(product, 10**places) > _MAX_DIVISOR
        if is_too_large:
            raise invalid(
                f"json: multipleOf is supported only up to {_MAX_DIVISOR}, without its decimal "
                "point, or up to this product if several apply to a value"
            )


@lru_cache(10_000)
def _decimal(number: float) -> Decimal:
    return Decimal(str(number + 0)).normalize()  # + 0 because of True


def _inside(schema: Mapping[str, Any]) -> Iterator[object]:
    """The subschemas that apply to nested values or that are alternatives for the same value."""
    for name in ("properties", "patternProperties"):
        values = schema.get(name)
        yield from values.values() if isinstance(values, Mapping) else ()
    yield from (schema.get(name) for name in ("additionalProperties", "items"))
    for name in ("prefixItems", *_ALTERNATIVES):
        yield from _list(schema, name)


def _list(schema: Mapping[str, Any], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _number(schema: Mapping[str, Any], name: str) -> float:
    value = schema.get(name)
    return value if isinstance(value, int | float) else 0


def _is_name(name: object) -> bool:
    return isinstance(name, str)


_SAFE = "/!$&'()*+,;=:@?-._~"
"""Characters that need no percent-encoding in a URI fragment (RFC 3986)."""


_NO_CODE = re.compile("%(?![0-9A-Fa-f]{2})")
_INSTANCES = frozenset({"const", "enum"})
"""Keywords whose values are not schemas."""


def find_ref(root: object, ref: str) -> tuple[object, list[str]] | None:
    """Returns the part of a schema that a reference names, and the part's path. None if the part
    does not exist. Names may be percent-encoded. As in ajv and jsonschema, the decoded name is
    looked up first, then the name as written.
    """
    if not ref.startswith("#"):
        return None
    value, path = root, list[str]()
    for written in ref[1:].split("/")[1:]:
        raw = written.replace("~1", "/").replace("~0", "~")
        name = next((one for one in (unquote(raw), raw) if _has(value, one)), None)
        if name is None:
            return None
        value = value[name] if isinstance(value, Mapping) else value[int(name)]  # type: ignore[index]
        path.append(name)
    return (value, path) if ref == "#" or ref.startswith("#/") else None


def with_encoded_refs(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema with references to its own parts encoded as URIs."""
    changed = _encoded(schema, schema)
    assert isinstance(changed, Mapping)
    return changed


def _encoded(value: object, root: object) -> object:
    if isinstance(value, Mapping):
        return {
            key: _encoded_ref(inner, root)
            if key == "$ref" and isinstance(inner, str)
            else (inner if key in _INSTANCES else _encoded(inner, root))
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_encoded(inner, root) for inner in value]
    return value


def _encoded_ref(ref: str, root: object) -> str:
    found = find_ref(root, ref)
    if found is None:
        is_own = ref.startswith("#")
        return _NO_CODE.sub("%25", quote(ref, safe=_SAFE + "#%")) if is_own else ref
    names = (name.replace("~", "~0").replace("/", "~1") for name in found[1])
    return "#" + "".join("/" + quote(name, safe=_SAFE.replace("/", "")) for name in names)


def _has(value: object, name: str) -> bool:
    if isinstance(value, Mapping):
        return name in value
    is_index = name.isdecimal() and len(name) <= _MAX_INDEX_DIGITS
    return isinstance(value, list) and is_index and int(name) < len(value)
