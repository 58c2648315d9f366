"""References of JSON Schemas to their own parts (RFC 6901, as a URI fragment)."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

_SAFE = "/!$&'()*+,;=:@?-._~"
"""Characters that need no percent-encoding in a URI fragment (RFC 3986)."""


_NO_CODE = re.compile("%(?![0-9A-Fa-f]{2})")
_INSTANCES = frozenset({"const", "enum"})
"""Keywords whose values are not schemas."""


def find_ref(root: object, ref: str) -> tuple[object, list[str]] | None:
    """Returns the part that a reference names, and the path to it. None if it does not exist. Names
    may be percent-encoded. As in ajv and jsonschema, the decoded name is looked up first, then the
    name as written.
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
    return isinstance(value, list) and name.isdecimal() and int(name) < len(value)
