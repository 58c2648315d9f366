"""The HTTP application of the gateway: its routes, and what is checked before them."""

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.http.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from services.gateway.adapters.http.errors import error_response, plain_error_response
from services.gateway.adapters.http.generation_routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    GenerationRoutes,
)
from services.gateway.adapters.http.hosts import HostCheck
from services.gateway.adapters.http.request_ids import HEADER as REQUEST_ID_HEADER
from services.gateway.adapters.http.request_ids import RequestIds
from services.gateway.adapters.http.server_routes import ServerRoutes
from services.gateway.adapters.http.tokenizer_routes import TokenizerRoutes


def make_app(
    generation: GenerationRoutes, tokenizer: TokenizerRoutes, server: ServerRoutes, keys: ApiKeys
) -> FastAPI:
    """All routes. Health and metrics need no key."""
    app = FastAPI(
        title="Stepwell",
        description="OpenAI's API with vLLM's common extras.",
        # Requests have their own span.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )

    async def authenticate(request: Request) -> None:
        # A coroutine, since the framework would run a function in a thread of its own.
        keys.check(request.headers.get("authorization", ""))

    locked = [Depends(authenticate)]
    with_body = [*locked, Depends(_check_content)]
    for path, handler, body in (
        (COMPLETIONS, generation.completions, CompletionBody),
        (CHAT_COMPLETIONS, generation.chat_completions, ChatCompletionBody),
        ("/tokenize", tokenizer.tokenize, TokenizeBody),
        ("/detokenize", tokenizer.detokenize, DetokenizeBody),
    ):
        extra = _describe_body(body)
        app.add_api_route(
            path, handler, methods=["POST"], openapi_extra=extra, dependencies=with_body
        )
    reads: tuple[tuple[str, Callable[..., Awaitable[Response]], list[Any]], ...] = (
        ("/v1/models", server.models, locked),
        ("/v1/models/{name:path}", server.model, locked),
        ("/status", server.status, locked),
        ("/health", server.health, []),
        ("/metrics", server.metrics, []),
    )
    for path, read, dependencies in reads:
        app.add_api_route(path, read, methods=["GET"], dependencies=dependencies)
        app.add_api_route(
            path, read, methods=["HEAD"], dependencies=dependencies, include_in_schema=False
        )
    app.add_exception_handler(StepwellError, _stepwell_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _defect)
    app.openapi()  # made now, since it takes longer than a request may
    return app


def guarded(app: ASGIApp, names: Sequence[str], allowed_origins: Sequence[str]) -> ASGIApp:
    """The application behind the checks of where a request comes from, with names for requests."""
    if allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
        )
    return RequestIds(HostCheck(app, names))


@cache
def _describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's `requestBody` for a body class, which is parsed by hand to name what is wrong."""
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


async def _check_content(request: Request) -> None:
    """Refuses bodies whose Content-Type is not JSON.

    A browser sends any other kind for a page of another site at once (a "simple" request); for JSON
    it asks the server first, which allows it only for the allowed origins (CORS).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be sent with Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(
            415, "the body must not be compressed", headers={"Accept-Encoding": "identity"}
        )


async def _stepwell_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StepwellError)
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = plain_error_response(error.status_code, message)
    response.headers.update(error.headers or {})
    return response


async def _defect(_request: Request, _error: Exception) -> Response:
    return error_response(InternalError("a defect here"))
