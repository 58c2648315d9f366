"""Counts HTTP requests by route, method and status."""

import re
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.adapters.http.route import Route
from services.gateway.adapters.metrics import Metrics

UNCOUNTED = frozenset({"/metrics", "/health", "/ping", "/load", "/version", "/status", "/activity"})
"""What programs ask again and again; vLLM does not count them either."""
OTHER = "none"
"""The route of paths that are not served."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class HttpCounts:
    """Counts a request when its answer has ended, with the time that it took."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], metrics: Metrics) -> None:
        self._app = app
        self._exact = {route.path for route in routes if "{" not in route.path}
        self._templates = [
            (re.compile(re.sub(r"\{.*\}", ".*", route.path)), route.path)
            for route in routes
            if "{" in route.path
        ]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            if status:
                self._count(scope, status, time.perf_counter() - began)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._metrics.answered(self._route(scope["path"]), method, status, seconds)

    def _route(self, path: str) -> str:
        if path in self._exact:
            return path
        for pattern, template in self._templates:
            if pattern.fullmatch(path):
                return template
        return OTHER
