"""An ASGI application of routes: an endpoint for each, and one place where errors are answered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.http.exchange.errors import error_response, plain_error_response
from services.gateway.adapters.http.exchange.route import Handler, Route
from services.gateway.adapters.telemetry.request_record import RequestRecord, is_failure

Check = Callable[[Request], Awaitable[None]]
"""Raises HTTPException or StepwellError for a request that is refused before its route."""

_DOCUMENT = "/openapi.json"
_VERSION = "/v1"
_MAX_PATH = 200


class Application:
    """Serves routes behind their checks, and their OpenAPI document, also as pages.

    A request passes the router and its endpoint, and nothing wraps its answer here: FastAPI, from
    which the pages are, has five layers of its own that would, and solves dependencies for each
    request.
    """

    def __init__(
        self,
        title: str,
        routes: Sequence[tuple[Route, Sequence[Check]]],
        document: Callable[[], dict[str, Any]],
    ) -> None:
        """`document` makes the OpenAPI document, in a thread."""
        endpoints = [
            StarletteRoute(route.path, _Endpoint(route.handler, checks), methods=route.methods)
            for route, checks in routes
        ]
        self._router = Router([*endpoints, *_document_routes(title, document)])
        self._paths = frozenset(route.path for route, _ in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # the router raises HTTPException for what it does not find then
        record: RequestRecord = scope["state"]["record"]
        try:
            await self._router(scope, receive, send)
        except StepwellError as error:
            record.failed(error.error_reason.lower(), error.message, is_failure=is_failure(error))
            await error_response(error, scope)(scope, receive, send)
        except HTTPException as error:
            await self._http_error(error, scope)(scope, receive, send)
        except Exception:
            if not record.status:  # the answer has not begun
                await error_response(InternalError("a defect here"), scope)(scope, receive, send)
            raise  # the server logs it

    def _http_error(self, error: HTTPException, scope: Scope) -> Response:
        path = Request(scope).url.path[:_MAX_PATH]
        message = f"{scope['method']} {path}: {error.detail}"
        if error.status_code == HTTPStatus.NOT_FOUND and (meant := self._similar(path)):
            message += f"; there is {meant}"
        response = plain_error_response(error.status_code, message, scope)
        response.headers.update(error.headers or {})
        return response

    def _similar(self, path: str) -> str | None:
        """The route that a client with another base URL asks for: one with or without /v1."""
        longer, shorter = f"{_VERSION}{path}", path.removeprefix(_VERSION)
        return next((known for known in (longer, shorter) if known in self._paths), None)


class _Endpoint:
    """One route: its checks, its handler, and the sending of what that returns."""

    def __init__(self, handler: Handler, checks: Sequence[Check]) -> None:
        self._handler = handler
        self._checks = tuple(checks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        for check in self._checks:
            await check(request)
        response = await self._handler(request)
        await response(scope, receive, send)


def _document_routes(title: str, document: Callable[[], dict[str, Any]]) -> list[StarletteRoute]:
    """The document, and the pages that show it.

    Each is made when it is first asked for, in a thread. The document takes 0.1 s, the import of
    what makes the pages twice as long: neither the start waits for that nor the event loop.
    """
    responses: dict[str, Callable[[], Response]] = {
        _DOCUMENT: lambda: JSONResponse(document()),
        "/docs": partial(_swagger_page, title),
        "/redoc": partial(_redoc_page, title),
    }

    def of(make: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        made = cache(make)

        async def endpoint(_request: Request) -> Response:
            return await asyncio.to_thread(made)

        return endpoint

    return [StarletteRoute(path, of(make)) for path, make in responses.items()]


def _swagger_page(title: str) -> Response:
    from fastapi.openapi.docs import get_swagger_ui_html  # noqa: PLC0415 - see _document_routes

    return get_swagger_ui_html(openapi_url=_DOCUMENT, title=f"{title} - Swagger UI")


def _redoc_page(title: str) -> Response:
    from fastapi.openapi.docs import get_redoc_html  # noqa: PLC0415 - see _document_routes

    return get_redoc_html(openapi_url=_DOCUMENT, title=f"{title} - ReDoc")
