"""HTTP routes for traces. One route lists stored and running requests. The other returns the trace
of one request with all its spans.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.common.errors import NotFound
from services.gateway.adapters.http.exchange.query import Query, read_query
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.options.viewer import answers
from services.gateway.options.viewer.core.trace_store import MaySee, StoredTrace, TraceStore
from services.gateway.options.viewer.traces.running import Order, RunningTraces
from services.gateway.options.viewer.traces.trace_document import (
    Document,
    OwnIds,
    document,
    own_part,
    summary,
    turn_of,
)

TRACES = "/traces"
_MAX_LISTED = 200
_NOBODY = ""
"""The caller id of spans whose request has not ended. Who sees all requests sees them."""


class TracesQuery(Query):
    """The query of /traces: the order and the maximum length of the list. If `program` is given,
    only ended requests of this agent program are listed.
    """

    order: Literal["newest", "slowest", "failed"] = "newest"
    limit: int = Field(default=20, ge=1, le=_MAX_LISTED)
    program: str | None = Field(default=None, max_length=256)


_CHOICES: dict[str, Callable[[list[Document]], list[Document]]] = {
    "newest": list,
    "slowest": lambda traces: sorted(traces, key=lambda trace: -trace["seconds"]),
    "failed": lambda traces: [trace for trace in traces if trace["error"] is not None],
}


def _turns(traces: Iterable[StoredTrace], program: str, own_ids: OwnIds) -> list[Document]:
    turns = list[Document]()
    for trace in traces:
        turn = turn_of(trace, program)
        if turn is not None and own_ids is not None:
            turn = turn_of(own_part(trace), program)
        if turn is not None:
            turns.append(summary(trace, own_ids) | {"turn": turn})
    return turns


@dataclass(eq=False)
class TraceRoutes:
    """Reads the traces of ended requests from the trace store, and queries the replicas for the
    spans of running requests. If `sees_all` is true, a caller sees the traces of all requests, and
    otherwise only the traces of its own requests.
    """

    store: TraceStore | None
    """If it is None, only running requests have traces."""
    running: RunningTraces
    sees_all: bool

    def routes(self) -> Sequence[Route]:
        return (
            Route(TRACES, self.traces, answers.Traces, query=TracesQuery, errors=(400,)),
            Route(f"{TRACES}/{{name:path}}", self.trace, answers.Trace, errors=(404,)),
        )

    async def traces(self, request: Request) -> Response:
        """Lists running requests, and ended requests whose traces are stored."""
        query = read_query(request, TracesQuery)
        may_see = partial(self._may_see, request)
        mine = self._kept(may_see)
        own_ids = self._own_ids(may_see)
        if query.program is not None:
            turns = await asyncio.to_thread(_turns, mine, query.program, own_ids)
            shown = _CHOICES[query.order](turns)[: query.limit]
            return self._answer(len(mine), shown)
        order = Order.OLDEST if query.order == "slowest" else Order.NEWEST
        running = self.running.requests(may_see, query.limit, order)
        listed = await asyncio.to_thread(
            lambda: _CHOICES[query.order]([summary(one, own_ids) for one in (*running, *mine)])
        )
        shown = listed[: query.limit]
        return self._answer(len(mine), shown)

    def _answer(self, num_kept: int, shown: list[Document]) -> Response:
        if self.store is not None:
            for one in shown:
                if not one["is_running"]:
                    self.store.shown(one["trace_id"])
        return JSONResponse(
            {"are_kept": self.store is not None, "num_kept": num_kept, "traces": shown}
        )

    async def trace(self, request: Request) -> Response:
        """Shows the trace with this id, or the trace of the request with this id. A running
        request's trace has only the spans that have begun.
        """
        name: str = request.path_params["name"]
        may_see = partial(self._may_see, request)
        found = await self.running.find(name, may_see)
        kept = None if self.store is None else self.store.find(name, may_see)
        if kept is not None and not may_see(_NOBODY):
            kept = kept.of(may_see) or StoredTrace(kept.trace_id, kept.spans)
        if found is None:
            found = kept
        elif kept is not None and kept.trace_id == found.trace_id:
            found.spans += kept.spans  # Spans that other services have already exported.
            found.roots = kept.roots + found.roots
        if found is None or not (found.roots or may_see(_NOBODY)):
            raise NotFound(self._why_not(name), field="name", reason="TRACE_NOT_FOUND")
        return JSONResponse(await asyncio.to_thread(document, found, self._own_ids(may_see)))

    def _kept(self, may_see: MaySee) -> list[StoredTrace]:
        kept = () if self.store is None else self.store.requests()
        return [mine for trace in kept if (mine := trace.of(may_see)) is not None]

    def _own_ids(self, may_see: MaySee) -> OwnIds:
        """Returns the ids of the requests that `may_see` accepts, or None if it accepts all."""
        if may_see(_NOBODY):
            return None
        ended = {root.request_id for trace in self._kept(may_see) for root in trace.roots}
        return ended | self.running.request_ids(may_see)

    def _may_see(self, request: Request, owner: str) -> bool:
        caller_id: str = request.state.caller.caller_id
        return self.sees_all or not caller_id or owner == caller_id

    def _why_not(self, name: str) -> str:
        if self.store is None:
            return (
                "no request with this id is running, and this gateway keeps no traces: set "
                "--trace-address, or ask the collector"
            )
        return (
            f"no trace of {name[:200]!r} is kept: the request was not sampled, or its trace was "
            "dropped"
        )
