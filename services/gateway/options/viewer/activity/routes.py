"""The routes of live data: /activity and /activity/history. `stepwell top` and /ui display them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, TypeAlias

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.adapters.http.exchange.query import Query, read_query
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.schedulers.converters import tenant_digest
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference
from services.gateway.options.viewer import answers
from services.gateway.options.viewer.activity.activity_document import Document
from services.gateway.options.viewer.activity.feed import ActivityFeed, ReplicaSample
from services.gateway.options.viewer.activity.history import history_document
from services.gateway.options.viewer.core.history import History

ACTIVITY = "/activity"
HISTORY = "/activity/history"
_MAX_QUEUED = 256
_TRACE_ID = slice(3, 35)
"""The place of the trace id in a traceparent."""

Own: TypeAlias = Mapping[str, set[str]] | None
"""Maps the request ids of the caller's own sequences to their trace ids. None means that the caller
may see all.
"""


class ActivityQuery(Query):
    """The query of /activity. `replica` is the address of the replica whose requests, steps and
    blocks are returned, or empty for all replicas. An item STEP@ADDRESS of `after` excludes the
    steps up to number STEP of the replica at ADDRESS.
    """

    replica: str = ""
    after: list[Annotated[str, Field(pattern=r"^[0-9]{1,18}@.+$")]] = Field(default_factory=list)


@dataclass(eq=False)
class ActivityRoutes:
    """The handlers of the routes. If `sees_all` is true, a caller sees the ids of all requests, and
    otherwise only the ids of its own requests.
    """

    feed: ActivityFeed
    recorded: History
    inference: Inference
    fleet: Fleet
    gate: Gate
    sees_all: bool

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                ACTIVITY,
                self.activity,
                answers.Activity,
                query=ActivityQuery,
                errors=(400,),
                is_polled=True,
            ),
            Route(HISTORY, self.history, answers.History),
        )

    async def history(self, _request: Request) -> Response:
        """Shows latencies, rates, queues, pools and events of the last minutes."""
        document = history_document(self.recorded, time.time())
        return JSONResponse(document, headers={"Cache-Control": "no-store"})

    async def activity(self, request: Request) -> Response:
        """Shows the activity of the replicas: queues, the latest steps, and KV blocks. The answer
        contains neither text nor tokens.
        """
        query = read_query(request, ActivityQuery)
        caller_id: str = request.state.caller.caller_id
        own = None if self.sees_all or not caller_id else self._own(caller_id)
        tenant = None if own is None else tenant_digest(caller_id)
        after = dict(_cursors(query.after))
        replicas = [
            _replica(sample, after.get(sample.address, -1), own, tenant)
            if query.replica in ("", sample.address)
            else _in_short(sample)
            for sample in await self.feed.samples()
        ]
        return JSONResponse(
            {
                "model": self.inference.model_name,
                "models": [
                    one.model_name
                    for one in (self.inference, *self.inference.others)
                    if request.state.caller.may_use(one.model_name)
                ],
                "unix_seconds": time.time(),
                "draining": not self.gate.is_open,
                "requests_in_flight": self.gate.inside,
                "queued": self._queued(own),
                "replicas": replicas,
            },
            headers={"Cache-Control": "no-store"},
        )

    def _queued(self, own: Own) -> list[Document]:
        return [
            {
                "request_id": _shown(queued.inflight.request.request_id, own),
                "wait_reason": queued.reason,
                "seconds": queued.seconds,
            }
            for queued in self.fleet.queued(_MAX_QUEUED)
        ]

    def _own(self, caller_id: str) -> Mapping[str, set[str]]:
        """Returns the ids and trace ids of a caller's sequences at replicas and in this gateway's
        queue.
        """
        running = [one.running.values() for one in self.fleet.membership.replicas]
        queued = [one.inflight for one in self.fleet.queued(_MAX_QUEUED)]
        own: dict[str, set[str]] = {}
        for inflight in chain(queued, *running):
            request = inflight.request
            if request.caller.caller_id == caller_id:
                trace_id = request.trace.traceparent[_TRACE_ID]
                own.setdefault(request.request_id, set()).add(trace_id)
        return own


def _cursors(after: Sequence[str]) -> Iterator[tuple[str, int]]:
    for text in after:
        step, _, address = text.partition("@")
        yield address, int(step)


def _in_short(sample: ReplicaSample) -> Document:
    return {
        "address": sample.address,
        "name": sample.name,
        "model": sample.model,
        "ready": sample.is_ready,
        "reason": sample.reason,
        "unfinished_here": sample.num_unfinished_here,
        "cached_tokens": sample.cached_tokens,
        "directory": sample.directory,
        "stats": sample.stats,
        "requests": [],
        "steps": [],
        "blocks": None,
        "programs": [],
    }


def _replica(sample: ReplicaSample, after: int, own: Own, tenant: bytes | None) -> Document:
    steps = list(sample.steps)
    if steps and after <= steps[-1]["step"]:  # Otherwise `after` is of an earlier process.
        steps = [step for step in steps if step["step"] > after]
    return _in_short(sample) | {
        "requests": [_masked(request, own) for request in sample.requests],
        "steps": steps,
        "blocks": sample.blocks,
        "programs": [
            program if tenant in (None, owner) else program | {"program": "", "tool": ""}
            for owner, program in sample.programs
        ],
    }


def _masked(request: Document, own: Own) -> Document:
    """Hides the ids of another tenant's sequence, which may have a request id of this tenant, since
    clients choose request ids.
    """
    request_id = request["request_id"]
    if own is None or (request_id in own and request["trace_id"] in {"", *own[request_id]}):
        return request
    return request | {"request_id": "", "trace_id": ""}


def _shown(request_id: str, own: Own) -> str:
    return request_id if own is None or request_id in own else ""
