"""Determines an HTTP request's tenant and checks its limits before the request's body is read."""

from collections.abc import Collection
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import PayloadTooLarge, StepwellError
from services.gateway.adapters.access import Access, authorization_of
from services.gateway.adapters.http.exchange.errors import error_response
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.options.tenants.core.limits.rule import UNITS, LimitSet, Standing
from services.gateway.options.tenants.core.limits.tenant_limits import (
    ALLOWANCE,
    Allowance,
    LimitReached,
    TenantLimits,
)

_NAMES = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in _NAMES
)


def rate_limit_headers(limits: LimitSet, standing: Standing) -> list[tuple[str, str]]:
    """Returns three headers for each of the tenant's limits per minute: the limit, the remaining
    amount, and the time until the whole amount is available again.
    """
    return [
        *_headers("requests", limits.requests_per_minute, standing.requests_level),
        *_headers("tokens", limits.tokens_per_minute, standing.tokens_level),
    ]


def _headers(what: str, limit: int | None, level: int) -> list[tuple[str, str]]:
    if limit is None:
        return []
    millis_to_full = -(-(limit * UNITS - level) // limit)
    values = (str(limit), str(max(0, level // UNITS)), duration(millis_to_full))
    return [
        (f"x-ratelimit-{name}-{what}", value) for name, value in zip(_NAMES, values, strict=True)
    ]


def duration(millis: int) -> str:
    """Formats a duration like OpenAI's API: 120ms, 1.5s, 6m0s."""
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


_SERVER_ERROR = 500


class TenantChecks:
    """Checks POST requests to `paths`: the declared size of the body, the API key, and the tenant's
    limits.

    The tenant is stored in the request's state. When the application has returned, the request's
    Allowance (the amounts of the tenant's limits reserved for it) is closed. Headers of the answer
    contain the remaining amounts of the limits.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        access: Access,
        limits: TenantLimits,
        observer: Observer,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._access = access
        self._limits = limits
        self._observer = observer
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            allowance = await self._admit(scope["state"])
        except StepwellError as error:
            response = error_response(error, scope)
            if isinstance(error, LimitReached):
                response.headers.update(dict(rate_limit_headers(error.limits, error.standing)))
            await response(scope, receive, send)
            return
        if allowance is None:
            await self._app(scope, receive, send)
        else:
            await self._serve(allowance, scope, receive, send)

    async def _admit(self, state: dict[str, Any]) -> Allowance | None:
        record: RequestRecord = state["record"]
        with self._observer.counting_refusals(record):
            declared = record.headers.get("content-length", "")
            if declared.isdigit() and int(declared) > self._max_body_bytes:
                raise PayloadTooLarge(
                    f"the body is larger than the limit of {self._max_body_bytes} bytes"
                )
            tenant = state["caller"] = await self._access.authenticate(
                authorization_of(record.headers)
            )
        with self._observer.counting_refusals(record, tenant):
            return await self._limits.admit(tenant)

    async def _serve(
        self, allowance: Allowance, scope: Scope, receive: Receive, send: Send
    ) -> None:
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(dict(rate_limit_headers(allowance.limits, allowance.standing)))
            await send(message)

        token = ALLOWANCE.set(allowance)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            ALLOWANCE.reset(token)
            record: RequestRecord = scope["state"]["record"]
            allowance.close(record.generation, was_refused=status >= _SERVER_ERROR)
