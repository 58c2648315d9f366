"""The routes about the server itself: models, version, load, status, health, metrics."""

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry.exposition import (
    CONTENT_TYPE,
    OPEN_METRICS_TYPE,
    open_metrics,
    wants_open_metrics,
)
from services.gateway.adapters.http.exchange.request_state import HAS_MODEL_PATH
from services.gateway.adapters.schedulers.scheduler_link import SchedulerLink
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.adapters.telemetry.fleet_metrics import FleetMetrics
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference

MODELS = "/v1/models"
METRICS = "/metrics"
_STATS_TIMEOUT_SECONDS = 1.0


class ServerRoutes:
    def __init__(
        self,
        inference: Inference,
        fleet: Fleet,
        links: SchedulerLinks,
        gate: Gate,
        metrics: FleetMetrics,
        private_labels: Sequence[str],
    ) -> None:
        """Clients cannot see the time series of metrics with one of `private_labels`."""
        self._inference = inference
        self._fleet = fleet
        self._membership = fleet.membership
        self._links = links
        self._gate = gate
        self._metrics = metrics
        self._private_labels = private_labels
        self.others: Sequence[ServerRoutes] = ()
        """The routes of the other models that this gateway serves."""
        self._created = int(time.time())
        self._version = version("stepwell")

    async def models(self, request: Request) -> Response:
        """Lists the served models that the API key may use."""
        may_use = request.state.caller.may_use
        data = [card for one in (self, *self.others) for card in one.cards() if may_use(card["id"])]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Shows one model. If the path has no name, lists all models."""
        # Starlette's path parameter would drop a line feed at the end of the path.
        name = str(request.scope["path"]).removeprefix(f"{MODELS}/")
        if not name:
            return await self.models(request)
        for one in self.others:
            if name in one._inference.names():
                return await one.model(request)
        self._inference.check_model(name, request.state.caller)
        return JSONResponse(self._model_card(name))

    def cards(self) -> list[dict[str, Any]]:
        """Describes the model and its adapters, as /v1/models lists them."""
        return [self._model_card(name) for name in self._inference.names()]

    async def status(self, _request: Request) -> Response:
        """Shows what this gateway knows about the replicas, with their queues and pools."""
        return JSONResponse(await self.describe())

    async def describe(self) -> dict[str, Any]:
        return {
            "model": self._inference.model_name,
            "draining": not self._gate.is_open,
            "requests_in_flight": self._gate.inside,
            "sequences_without_replica": self._fleet.num_waiting,
            "replicas": await asyncio.gather(
                *(
                    _status(replica, self._links[replica.address])
                    for replica in self._membership.replicas
                )
            ),
        }

    async def health(self, request: Request) -> Response:
        """Answers with status 200 if at least one replica can serve, and otherwise with 503.

        The body lists the unready replicas, or has the reason for the status 503.
        """
        others = () if HAS_MODEL_PATH in request.scope["state"] else self.others
        models = (self, *others)
        if all(reasons := [one.why_not_ready() for one in models]):
            reason = "; ".join(dict.fromkeys(reasons))
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        reasons_of = (one._membership.not_ready().items() for one in models)
        not_ready = dict(chain.from_iterable(reasons_of))
        return JSONResponse({"status": "ok", "not_ready": not_ready})

    def why_not_ready(self) -> str:
        """Returns why no replica of the model can serve, or "" if one can."""
        return self._membership.why_not_ready() if self._gate.is_open else "shutting down"

    async def ping(self, request: Request) -> Response:
        """The same as /health, under the path that SageMaker calls."""
        return await self.health(request)

    async def version(self, _request: Request) -> Response:
        """Shows the version of this server."""
        return JSONResponse({"version": self._version})

    async def load(self, _request: Request) -> Response:
        """Shows the number of requests that this gateway is serving."""
        num_inside = sum(one._gate.inside for one in (self, *self.others))
        return JSONResponse({"server_load": num_inside})

    async def metrics(self, request: Request) -> Response:
        """Returns the Prometheus metrics of this gateway and of every replica.

        The route needs no API key. Series that clients may not see are omitted.
        """
        is_open = wants_open_metrics(request.headers.get("accept", ""))
        text = await self._metrics.collect(self._private_labels, exemplars=is_open)
        if is_open:
            return Response(open_metrics(text), media_type=OPEN_METRICS_TYPE)
        return Response(text, media_type=CONTENT_TYPE)

    def _model_card(self, name: str) -> dict[str, Any]:
        adapter = self._inference.adapters.find(name)
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "stepwell"}
        if adapter is not None:
            card |= {"root": adapter.path, "parent": self._inference.model_name}
        return {**card, "max_model_len": self._membership.max_model_len()}


async def _status(replica: Replica, link: SchedulerLink) -> dict[str, Any]:
    served = replica.description
    status: dict[str, Any] = {
        "address": replica.address,
        "model": served.model_name if served is not None else "",
        "fingerprint": served.fingerprint.hex()[:16] if served is not None else "",
        "ready": replica.is_ready,
        "reason": replica.reason,
        "unfinished_here": replica.num_unfinished,
        "stats": None,
    }
    try:
        stats = await link.stats(_STATS_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        status["reason"] = status["reason"] or f"{error.code().name}: {error.details()}"
        return status
    status["stats"] = stats_document(stats)
    return status


def stats_document(stats: scheduler_pb2.GetStatsResponse) -> dict[str, Any]:
    """Returns a scheduler's statistics. The keys are the names of the fields in the .proto."""
    numbers = MessageToDict(
        stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # The JSON mapping of protobuf writes 64-bit numbers as strings.
    return {
        name: int(value) if isinstance(value, str) and value.isdigit() else value
        for name, value in numbers.items()
        if name != "incarnation"
    } | {"incarnation": stats.incarnation}
