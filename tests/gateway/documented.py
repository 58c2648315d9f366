"""Checks HTTP answers against an OpenAPI document."""

import json
from typing import Any

import httpx
from jsonschema_rs import Draft202012Validator

STANDARD_HEADERS = {
    *("content-type", "content-length", "date", "transfer-encoding", "connection"),
    *("cache-control", "x-accel-buffering"),
}
"""General HTTP headers, which need not be documented."""


class Documented:
    """Validates answers against an OpenAPI document. Undocumented fields are errors."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._components = _closed(document["components"])
        self._validators: dict[int, Draft202012Validator] = {}

    def check(self, path: str, response: httpx.Response) -> None:
        """Asserts that the document describes the response: its status, headers and body."""
        method = response.request.method.lower()
        operation = self.document["paths"][path][method]
        documented = operation["responses"].get(str(response.status_code))
        what = f"{method} {path}: {response.status_code} {response.text[:300]}"
        assert documented is not None, what
        if "$ref" in documented:
            documented = self._components["responses"][documented["$ref"].rpartition("/")[2]]
        headers = {name.lower() for name in documented["headers"]}
        assert set(response.headers) <= headers | STANDARD_HEADERS, what
        if method == "head":
            assert response.content == b"", what
            return
        kind = response.headers["content-type"]
        content = documented["content"].get(kind) or documented["content"][kind.partition(";")[0]]
        if "itemSchema" in content:
            parts = content["itemSchema"]["properties"]
            schema = parts["data"]["anyOf"][0]["contentSchema"]
            self._check_events(schema, response.text, has_names="event" in parts)
        elif kind == "application/json":
            self._validate(content["schema"], response.json())

    def _check_events(self, schema: dict[str, Any], text: str, *, has_names: bool) -> None:
        events = text.strip().split("\n\n")
        if not has_names:
            assert events.pop() == "data: [DONE]"
        for event in events:
            head, _, data = event.rpartition("data: ")
            body = json.loads(data)
            assert head == (f"event: {body['type']}\n" if has_names else "")
            self._validate(schema, body)

    def _validate(self, schema: dict[str, Any], value: Any) -> None:
        if id(schema) not in self._validators:
            whole = {**_closed(schema), "components": self._components}
            self._validators[id(schema)] = Draft202012Validator(whole)
        self._validators[id(schema)].validate(value)


def _closed(node: Any) -> Any:
    """The schema, changed so that its objects allow no unlisted properties."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    if "properties" in node and isinstance(node["properties"], dict):
        closed["additionalProperties"] = False
    return closed
