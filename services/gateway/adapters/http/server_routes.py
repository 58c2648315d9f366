"""The routes about the server itself: models, status, health, metrics."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from starlette.responses import JSONResponse, Response

from services.common import metrics
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.scheduler_link import SchedulerLink
from services.gateway.core.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference
from services.gateway.core.replica import Replica

_STATS_TIMEOUT_SECONDS = 1.0


class ServerRoutes:
    def __init__(
        self,
        inference: Inference,
        fleet: Fleet,
        links: Mapping[str, SchedulerLink],
        gate: Gate,
        metrics: Metrics,
    ) -> None:
        self._inference = inference
        self._fleet = fleet
        self._membership = fleet.membership
        self._links = links
        self._gate = gate
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self) -> Response:
        """The models served here."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """One model; without a name, all of them."""
        if not name:
            return await self.models()
        self._inference.check_model(name)
        return JSONResponse(self._model_card())

    async def status(self) -> Response:
        """Replicas, their queues and pools, as seen from here."""
        return JSONResponse(
            {
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
        )

    async def health(self) -> Response:
        """200 when a replica can serve requests, with those that cannot; else 503 and why not."""
        reason = self._membership.why_not_ready() if self._gate.is_open else "shutting down"
        if reason:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok", "not_ready": self._membership.not_ready()})

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        self._metrics.replicas_ready.set(self._membership.num_ready)
        return Response(self._metrics.render(), media_type=metrics.CONTENT_TYPE)

    def _model_card(self) -> dict[str, Any]:
        name = self._inference.model_name
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "stepwell"}
        return {**card, "max_model_len": self._membership.max_model_len()}


async def _status(replica: Replica, link: SchedulerLink) -> dict[str, Any]:
    """What `stepwell status` shows of a replica, with the scheduler's own numbers."""
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
    numbers = MessageToDict(
        stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # JSON mapping of protobuf writes 64-bit numbers as strings.
    status["stats"] = {
        name: int(value) if isinstance(value, str) and value.isdigit() else value
        for name, value in numbers.items()
        if name != "incarnation"
    } | {"incarnation": stats.incarnation}
    return status
