"""The routes for operators: pause, resume, reset, drain. Their names are vLLM's where vLLM has such
a route.
"""

import dataclasses
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.common.redis.url import is_redis_url, without_secrets
from services.common.replica.pause_mode import PauseMode
from services.gateway.adapters.http.clients.server_routes import ServerRoutes
from services.gateway.adapters.http.exchange.errors import error_body, status_of
from services.gateway.adapters.http.exchange.query import Query, read_query
from services.gateway.adapters.http.exchange.route import READ, Handler, Route
from services.gateway.adapters.http.openapi import admin_answers as answers
from services.gateway.core.fleet.administration import Administration, Outcome
from services.gateway.settings import GatewaySettings

_PASSWORD = re.compile(r"(?<=://)[^/?#]*@")


class ReplicasQuery(Query):
    """The query of operators' calls: the addresses of the replicas to call. An empty list means all
    replicas.
    """

    replica: list[str] = Field(default_factory=list)


class OneReplicaQuery(Query):
    """The query of calls that need at least one replica's address."""

    replica: list[str] = Field(min_length=1)


class PauseQuery(ReplicasQuery):
    """The parameters of vLLM's /pause. `wait_for_inflight_requests` is vLLM's former name of the
    mode `wait`.
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    wait_for_inflight_requests: bool = False
    clear_cache: bool = True
    timeout_seconds: float = Field(default=60.0, gt=0, le=3600)


class ResetQuery(ReplicasQuery):
    """The parameters of vLLM's /reset_prefix_cache. The external cache is the workers' host memory
    for offloaded KV blocks.
    """

    reset_running_requests: bool = False
    reset_external: bool = False


@dataclass(eq=False)
class AdminRoutes:
    """The handlers of operators' routes. Each answer contains the result of every replica that was
    called. The status is 200 if all calls succeeded, and otherwise the status of the first failure.
    """

    administration: Administration
    server: ServerRoutes
    settings: GatewaySettings

    def routes(self) -> Sequence[Route]:
        return (
            _route("/pause", self.pause, PauseQuery),
            _route("/resume", self.resume, ReplicasQuery),
            _route("/reset_prefix_cache", self.reset_prefix_cache, ResetQuery),
            _route("/drain", self.drain, OneReplicaQuery),
            _route("/undrain", self.undrain, OneReplicaQuery),
            _route("/is_paused", self.is_paused, ReplicasQuery, answers.IsPaused, READ),
            Route("/server_info", self.server_info, answers.ServerInfo, errors=(403,)),
        )

    async def pause(self, request: Request) -> Response:
        """Pauses the engines.

        The mode determines whether running requests are aborted, finished first, or kept until the
        engines are resumed.
        """
        query = read_query(request, PauseQuery)
        mode = PauseMode.WAIT if query.wait_for_inflight_requests else PauseMode(query.mode)
        outcomes = await self.administration.pause(
            query.replica,
            mode,
            clear_cache=query.clear_cache and mode is not PauseMode.KEEP,
            timeout_seconds=query.timeout_seconds,
        )
        return _answer(outcomes, status="paused")

    async def resume(self, request: Request) -> Response:
        """Ends a pause."""
        query = read_query(request, ReplicasQuery)
        return _answer(await self.administration.resume(query.replica), status="resumed")

    async def is_paused(self, request: Request) -> Response:
        """Shows whether every replica is paused."""
        query = read_query(request, ReplicasQuery)
        outcomes = await self.administration.is_paused(query.replica)
        all_paused = all(outcome.said.get("is_paused") for outcome in outcomes)
        return _answer(outcomes, is_paused=all_paused)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Clears the prefix cache. Fails if requests are running and are not preempted."""
        query = read_query(request, ResetQuery)
        outcomes = await self.administration.reset_prefix_cache(
            query.replica,
            preempt_running=query.reset_running_requests,
            reset_connector=query.reset_external,
        )
        return _answer(outcomes, status="reset")

    async def drain(self, request: Request) -> Response:
        """Drains replicas.

        They finish their requests, and accept no new requests from any gateway.
        """
        query = read_query(request, OneReplicaQuery)
        return _answer(await self.administration.drain(query.replica), status="draining")

    async def undrain(self, request: Request) -> Response:
        """Ends the draining of replicas. They accept requests again."""
        query = read_query(request, OneReplicaQuery)
        return _answer(await self.administration.undrain(query.replica), status="undrained")

    async def server_info(self, _request: Request) -> Response:
        """Shows the gateway's version, its settings without secrets, and its replicas."""
        settings = {
            field.name: _shown(
                getattr(self.settings, field.name), is_secret=field.metadata["is_secret"]
            )
            for field in dataclasses.fields(self.settings)
        }
        return JSONResponse(
            {"version": version("stepwell"), "settings": settings, **await self.server.describe()}
        )


def _route(
    path: str,
    handler: Handler,
    query: type[Query],
    answer: type[BaseModel] = answers.Done,
    methods: tuple[str, ...] = ("POST",),
) -> Route:
    failed = dict.fromkeys((400, 409, 500, 503, 504), answers.Failed)
    return Route(
        path, handler, answer, methods, query=query, errors=(403, 404), other_answers=failed
    )


async def refuse_web_pages(request: Request) -> None:
    """Refuses requests that a browser sends for a page of another site, because any page can make a
    browser post to local addresses. Requests of the server's own page /ui are allowed: their header
    Origin equals the header Host, which was checked before.
    """
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if request.headers.get("origin", own) != own:
        raise HTTPException(HTTPStatus.FORBIDDEN, "operators' calls from web pages are refused")


def _answer(outcomes: Sequence[Outcome], **done: Any) -> Response:
    replicas = [
        {
            "address": outcome.address,
            "ok": outcome.error is None,
            **outcome.said,
            **(error_body(outcome.error) if outcome.error is not None else {}),
        }
        for outcome in outcomes
    ]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return JSONResponse({**done, "replicas": replicas})
    error = failed[0].error
    assert error is not None
    names = ", ".join(f"{each.address}: {each.error}" for each in failed)
    summary = f"{len(failed)} of {len(outcomes)} replicas did not complete the operation: {names}"
    return JSONResponse(
        {**error_body(error, summary), "replicas": replicas}, status_code=status_of(error)
    )


def _shown(value: object, *, is_secret: bool) -> object:
    if is_secret and isinstance(value, str) and is_redis_url(value) is None:
        return without_secrets(value)
    if is_secret:
        return "***" if value else None
    if isinstance(value, str | Path):
        return _PASSWORD.sub("***@", str(value))
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
