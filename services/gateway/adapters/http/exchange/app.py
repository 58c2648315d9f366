"""The HTTP applications of the gateway: their routes, and the checks before the routes."""

from collections.abc import Mapping, Sequence
from functools import partial

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.access import Access, authorization_of
from services.gateway.adapters.http.exchange.application import Application, Check
from services.gateway.adapters.http.exchange.errors import HINT_HEADERS
from services.gateway.adapters.http.exchange.ignored_fields import HEADER as IGNORED_FIELDS
from services.gateway.adapters.http.exchange.request_records import RequestRecords
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.http.openapi.document import openapi_document
from services.gateway.adapters.http.transport.hosts import HostCheck, HostNames
from services.gateway.adapters.telemetry.request_record import REQUEST_ID, TRACE_ID
from services.gateway.adapters.telemetry.request_recorder import RequestRecorder


def make_app(
    title: str,
    description: str,
    routes: Sequence[Route],
    access: Access,
    *,
    checks: Sequence[Check] = (),
    answer_headers: Sequence[str] = (),
) -> Application:
    """Makes an application of these routes. `checks` run before each handler. `access` checks the
    API key for routes that need one. `answer_headers` are the headers that options, the removable
    parts of the gateway, add to answers.
    """
    document = partial(
        openapi_document,
        title,
        description,
        routes,
        asks_for_keys=access.needs_key,
        limit_headers=answer_headers,
    )

    async def authenticate(request: Request) -> None:
        state = request.scope["state"]
        if "caller" not in state:
            state["caller"] = await access.authenticate(authorization_of(state["record"].headers))

    checked = []
    for route in routes:
        needed = [*checks]
        if route.needs_key:
            needed.append(authenticate)
        if route.body is not None:
            needed.append(_check_content)
        checked.append((route, needed))
    return Application(title, checked, document)


def guarded(
    app: ASGIApp,
    names: HostNames,
    allowed_origins: Sequence[str],
    recorder: RequestRecorder,
    operations: Mapping[str, str],
    counted: ASGIApp | None = None,
    answer_headers: Sequence[str] = (),
) -> ASGIApp:
    """Wraps the application in middlewares that check each request's origin and host and create its
    RequestRecord. `operations` and `counted` are arguments of RequestRecords. Web pages may read
    the headers `answer_headers`.
    """
    if allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, TRACE_ID, IGNORED_FIELDS, *HINT_HEADERS, *answer_headers),
        )
    return RequestRecords(HostCheck(app, names), recorder, operations, counted)


async def _check_content(request: Request) -> None:
    """Refuses bodies that are compressed or whose Content-Type is not JSON.

    The reason for the second check: a web page of another site can make a browser send a form or
    plain text without asking this server. Before a browser sends JSON for the page, it asks by a
    CORS preflight request, and the server permits only the allowed origins.
    """
    headers = request.scope["state"]["record"].headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be sent with Content-Type: application/json")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(
            415, "the body must not be compressed", headers={"Accept-Encoding": "identity"}
        )
