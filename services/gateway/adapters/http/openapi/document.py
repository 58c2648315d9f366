"""Builds an application's OpenAPI document from its routes."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.common.request.sampling import RANGES
from services.common.request.sampling_limits import MAX_LOGPROBS
from services.gateway.adapters.http.exchange.fields import Body
from services.gateway.adapters.http.exchange.ignored_fields import HEADER as IGNORED_FIELDS
from services.gateway.adapters.http.exchange.route import RequestHeader, Route
from services.gateway.adapters.http.openai.sampling_fields import CommonSamplingFields
from services.gateway.adapters.http.openapi.answers import Error
from services.gateway.adapters.http.openapi.errors import (
    ERRORS,
    EVERYWHERE,
    HEADERS,
    LIMIT_HEADER,
    ErrorAnswer,
)
from services.gateway.core.request.request_check import MAX_STOP_STRINGS

_SCHEMAS = "#/components/schemas/"
_KEY, _KEY_IN_HEADER = "apiKey", "apiKeyInHeader"
_JSON = "application/json"
_EVENT_STREAM = "text/event-stream"
_OTHER_THAN_CLIENTS = {"seed", "top_k"}
"""Parameters that may be negative in bodies, but not in the core."""

_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}

_LIMITS: dict[str, Mapping[str, float]] = {
    **{
        name: {"minimum": low, "maximum": high}
        for name, (low, high) in RANGES.items()
        if name not in _OTHER_THAN_CLIENTS
    },
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": RANGES["top_k"][1]},
    "n": {"minimum": 1},
    "best_of": {"minimum": 1},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "stop_sequences": {"maxItems": MAX_STOP_STRINGS},
}
"""Maps fields to keywords of JSON Schema. Each keyword applies only to values of its type, so null
and booleans are not restricted.
"""


def openapi_document(
    title: str,
    description: str,
    routes: Sequence[Route],
    *,
    asks_for_keys: bool,
    limit_headers: Sequence[str],
) -> dict[str, Any]:
    """Builds the document. If `asks_for_keys` is true, routes that need an API key have a security
    requirement. `limit_headers` are the headers with the remaining amounts of the client's limits.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        item = paths.setdefault(re.sub(r":\w+}", "}", route.path), {})
        for method in route.methods:
            item[method.lower()] = _operation(
                route, method, route.needs_key and asks_for_keys, limit_headers
            )
    errors = _error_answers(routes, limit_headers)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "description": description, "version": version("stepwell")},
        "paths": paths,
        "components": {
            "schemas": _schemas(_models(routes)),
            "responses": {error.name: _error(error) for error in errors.values()},
            "headers": HEADERS | dict.fromkeys(limit_headers, LIMIT_HEADER),
        },
    }
    if asks_for_keys:
        document["components"]["securitySchemes"] = {
            _KEY: {"type": "http", "scheme": "bearer"},
            _KEY_IN_HEADER: {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return document


def _operation(
    route: Route, method: str, needs_key: bool, limit_headers: Sequence[str]
) -> dict[str, Any]:
    """Returns the operation for one method of a route. HEAD has the answers of GET, without
    bodies.
    """
    is_head = method == "HEAD"
    errors = _error_answers([route], limit_headers)
    statuses = _error_statuses(route, needs_key)
    responses = {"200": _answer(route, limit_headers if needs_key else ())}
    responses |= {str(status): _error_of(route, errors[status]) for status in statuses}
    for status, model in route.other_answers.items():
        responses[str(status)] = _other_answer(errors[status], model)
    if is_head:
        responses = {
            status: _without_body(errors[int(status)].headers if int(status) in errors else ())
            for status in responses
        }
    words = (inspect.getdoc(route.handler) or "").split()
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__
        + ("" if method == route.methods[0] else f"_{method}"),
        "tags": [route.tag],
        "summary": " ".join(words).partition(". ")[0].removesuffix("."),
        "responses": dict(sorted(responses.items())),
    }
    if parameters := [*_path_parameters(route), *_query(route), *map(_header, route.headers)]:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {_JSON: {"schema": _reference(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    if needs_key:
        operation["security"] = [{_KEY: []}, {_KEY_IN_HEADER: []}]
    return operation


def _error_answers(routes: Iterable[Route], limit_headers: Sequence[str]) -> dict[int, ErrorAnswer]:
    """Returns the error answers of all routes, including those that only a request header
    causes.
    """
    over_limit = ERRORS[HTTPStatus.TOO_MANY_REQUESTS]
    over_limit = replace(over_limit, headers=(*over_limit.headers, *limit_headers))
    errors = ERRORS | {HTTPStatus.TOO_MANY_REQUESTS: over_limit}
    for route in routes:
        for header in route.headers:
            errors |= header.errors
    return errors


def _error_statuses(route: Route, needs_key: bool) -> list[int]:
    statuses = {*EVERYWHERE, *route.errors}
    statuses |= {status for header in route.headers for status in header.errors}
    if needs_key:
        statuses |= {401, 403}
    if route.body is not None:
        statuses |= {413, 415}
    return sorted(statuses)


def _answer(route: Route, limit_headers: Sequence[str]) -> dict[str, Any]:
    headers = limit_headers if route.is_limited else ()
    content: dict[str, Any]
    if isinstance(route.answer, str):
        content = {route.answer: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": _reference(route.answer)}}
    if route.events is not None:
        content[_EVENT_STREAM] = {"itemSchema": _event(route, route.events)}
    return {"description": "Success.", "headers": _headers(headers), "content": content}


def _event(route: Route, model: type[BaseModel]) -> dict[str, Any]:
    """Returns the schema of a server-sent event. The schema is written as in OpenAPI 3.2, although
    the document's version is 3.1.
    """
    schema = {"anyOf": [_reference(model), _reference(route.error)]}
    data: list[dict[str, Any]] = [{"contentMediaType": _JSON, "contentSchema": schema}]
    properties: dict[str, Any] = {"data": {"type": "string", "anyOf": data}}
    if route.has_named_events:
        properties["event"] = {"type": "string"}
    else:
        data.append({"const": "[DONE]"})
    return {"type": "object", "properties": properties, "required": [*properties]}


def _error_of(route: Route, error: ErrorAnswer) -> dict[str, Any]:
    if route.error is Error:
        return {"$ref": f"#/components/responses/{error.name}"}
    return _error(error, route.error)


def _error(error: ErrorAnswer, model: type[BaseModel] = Error) -> dict[str, Any]:
    return {
        "description": error.description,
        "headers": _headers(error.headers),
        "content": {_JSON: {"schema": _reference(model)}},
    }


def _other_answer(error: ErrorAnswer, model: type[BaseModel]) -> dict[str, Any]:
    """Returns the description of an answer whose body is either `model` or an error's body."""
    answer = _error(error)
    schema = {"anyOf": [_reference(model), _reference(Error)]}
    return {**answer, "content": {_JSON: {"schema": schema}}}


def _without_body(headers: Iterable[str]) -> dict[str, Any]:
    return {"description": "As for GET, without a body.", "headers": _headers(headers)}


def _headers(names: Iterable[str]) -> dict[str, Any]:
    everywhere = ("X-Request-Id", "X-Trace-Id", IGNORED_FIELDS)
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*everywhere, *names)}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", route.path)
    ]


def _query(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = route.query.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": value}
        for name, value in schema["properties"].items()
    ]


def _header(header: RequestHeader) -> dict[str, Any]:
    return {
        "name": header.name,
        "in": "header",
        "required": False,
        "description": header.description,
        "schema": dict(header.schema),
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + model.__name__}


def _models(routes: Sequence[Route]) -> tuple[type[BaseModel], ...]:
    models: dict[type[BaseModel], None] = {Error: None}
    for route in routes:
        used = (route.answer, route.events, route.body, route.error, *route.other_answers.values())
        models |= dict.fromkeys(model for model in used if isinstance(model, type))
    return tuple(models)


@cache
def _schemas(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """Returns the schemas of these models and of the models that they refer to. Building the
    schemas takes most of the time for a document, so they are cached.
    """
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    definitions: dict[str, Any] = schemas["$defs"]
    bodies = {body.__name__ for body in _subclasses(Body)}
    for name, definition in definitions.items():
        # By default the server ignores unknown fields of requests, so the schema must not forbid
        # them.
        if name.rpartition("__")[2] in bodies and definition.get("additionalProperties") is False:
            del definition["additionalProperties"]
    for model in models:
        if issubclass(model, CommonSamplingFields):
            _add_ranges(definitions[model.__name__])
    return definitions


def _add_ranges(schema: dict[str, Any]) -> None:
    for name, limits in _LIMITS.items():
        if name in schema["properties"]:
            known = schema["properties"][name]
            known.update({key: value for key, value in limits.items() if key not in known})


def _subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
