"""An ASGI application that calls the handler of each route, and converts errors to answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from services.common.errors import InternalError, StepwellError
from services.gateway.adapters.http.exchange.errors import error_response, plain_error_response
from services.gateway.adapters.http.exchange.route import Handler, Route
from services.gateway.adapters.http.openapi.pages import redoc_page, swagger_page
from services.gateway.adapters.telemetry.request_record import RequestRecord, is_failure

Check = Callable[[Request], Awaitable[None]]
"""Raises HTTPException or StepwellError if the request must not reach its handler."""

_DOCUMENT = "/openapi.json"
_VERSION = "/v1"
_MAX_PATH = 200


class Application:
    """Runs the checks and the handler of each request's route. Also serves the OpenAPI document, as
    JSON and as HTML pages.
    """

    def __init__(
        self,
        title: str,
        routes: Sequence[tuple[Route, Sequence[Check]]],
        document: Callable[[], dict[str, Any]],
    ) -> None:
        """`document` builds the OpenAPI document, and is called in a thread."""
        endpoints = [
            StarletteRoute(route.path, _Endpoint(route.handler, checks), methods=route.methods)
            for route, checks in routes
        ]
        self._router = Router([*endpoints, *_document_routes(title, document)])
        self._paths = frozenset(route.path for route, _ in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with this key the router raises HTTPException for an unknown path
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
                await error_response(
                    InternalError(
                        "the request failed because of a defect of the server; its log has the "
                        "cause"
                    ),
                    scope,
                )(scope, receive, send)
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
        """Returns the path with /v1 added or removed if it is a known path, because a client with a
        wrong base URL probably means it. Otherwise returns None.
        """
        longer, shorter = f"{_VERSION}{path}", path.removeprefix(_VERSION)
        return next((known for known in (longer, shorter) if known in self._paths), None)


class _Endpoint:
    """Runs the checks and the handler of one route, and sends the handler's response."""

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
    """Returns the routes of the OpenAPI document and of the pages that show it. The document is
    built at the first request for it, in a thread because that takes 0.1 s.
    """
    made = cache(lambda: JSONResponse(document()))

    async def answer(_request: Request) -> Response:
        return await asyncio.to_thread(made)

    def page(html: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(_request: Request) -> Response:
            return HTMLResponse(html)

        return endpoint

    return [
        StarletteRoute(_DOCUMENT, answer),
        StarletteRoute("/docs", page(swagger_page(title, _DOCUMENT))),
        StarletteRoute("/redoc", page(redoc_page(title, _DOCUMENT))),
    ]
