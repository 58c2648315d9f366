"""Describes request bodies to OpenAPI: they are parsed by hand, to name what is wrong in them."""

from functools import cache
from typing import Any

from pydantic import BaseModel


@cache
def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's `requestBody` for a body class, complete in itself, which nothing may change."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema with every reference replaced by what it refers to; no body is recursive."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
