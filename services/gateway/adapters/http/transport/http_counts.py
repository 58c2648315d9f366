"""Counts HTTP requests by route, method and status."""

import re
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.request_record import CLIENT_CLOSED_REQUEST, RequestRecord

OTHER = "none"
"""The label for requests with unknown paths."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class HttpCounts:
    """Counts a request and its duration when its answer has ended. The status is read from the
    RequestRecord, which the wrapped application, RequestRecords, has created.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route], metrics: Metrics) -> None:
        self._app = app
        self._exact = {route.path for route in routes if "{" not in route.path}
        self._polled = {route.path for route in routes if route.is_polled}
        self._templates = [
            (re.compile(re.sub(r"\{.*\}", ".*", route.path)), route.path)
            for route in routes
            if "{" in route.path
        ]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._polled:
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        try:
            await self._app(scope, receive, send)
        finally:
            record: RequestRecord = scope["state"]["record"]
            if record.status != CLIENT_CLOSED_REQUEST:
                self._count(scope, int(record.status), time.perf_counter() - began)

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
