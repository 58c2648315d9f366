"""The HTTP applications of the gateway: their routes, and what is checked before them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.auth import ApiKeys, authorization_of
from services.gateway.adapters.http.errors import (
    HINT_HEADERS,
    error_response,
    plain_error_response,
)
from services.gateway.adapters.http.hosts import HostCheck, HostNames
from services.gateway.adapters.http.openapi.document import openapi_document
from services.gateway.adapters.http.request_records import RequestRecords
from services.gateway.adapters.http.route import Route
from services.gateway.adapters.rate_limit_headers import RATE_LIMIT_HEADERS
from services.gateway.adapters.request_record import REQUEST_ID, TRACE_ID
from services.gateway.adapters.request_recorder import RequestRecorder

Check = Callable[[Request], Awaitable[None]]
"""Raises HTTPException or StepwellError for a request that is refused before its route."""


def make_app(
    title: str,
    description: str,
    routes: Sequence[Route],
    keys: ApiKeys,
    *,
    asks_for_keys: bool,
    checks: Sequence[Check] = (),
) -> FastAPI:
    """An application of these routes. Each request passes `checks`, and shows one of the keys where
    its route needs one.
    """
    # Made now, since it takes longer than a request may.
    document = openapi_document(title, description, routes, asks_for_keys=asks_for_keys)
    app = _Application(
        document,
        title=title,
        # Requests have their own span.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )

    async def authenticate(request: Request) -> None:
        # A coroutine, since the framework would run a function in a thread of its own.
        if not hasattr(request.state, "tenant"):
            request.state.tenant = await keys.authenticate(authorization_of(request.headers))

    for route in routes:
        needed = [*checks]
        if route.needs_key:
            needed.append(authenticate)
        if route.body is not None:
            needed.append(_check_content)
        app.add_api_route(
            route.path,
            route.handler,
            methods=list(route.methods),
            dependencies=[Depends(check) for check in needed],
            include_in_schema=False,
        )
    app.add_exception_handler(StepwellError, _stepwell_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _defect)
    return app


class _Application(FastAPI):
    """Serves a document that was made of the routes, in place of one made of their signatures."""

    def __init__(self, document: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._document = document

    def openapi(self) -> dict[str, Any]:
        return self._document


def guarded(
    app: ASGIApp,
    names: HostNames,
    allowed_origins: Sequence[str],
    recorder: RequestRecorder,
    operations: Mapping[str, str],
) -> ASGIApp:
    """The application behind the checks of where a request comes from, with records of requests.
    `operations` has the GenAI operation of each path that generates.
    """
    if allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, TRACE_ID, *HINT_HEADERS, *RATE_LIMIT_HEADERS),
        )
    return RequestRecords(HostCheck(app, names), recorder, operations)


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


async def _stepwell_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StepwellError)
    return error_response(error, request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = plain_error_response(error.status_code, message, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _defect(request: Request, _error: Exception) -> Response:
    return error_response(InternalError("a defect here"), request.scope)
