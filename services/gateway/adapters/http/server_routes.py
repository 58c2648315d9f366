"""The routes about the server itself: models, status, health, metrics."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from services.common import metrics
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.scheduler_link import SchedulerLink
from services.gateway.adapters.status import replica_statuses
from services.gateway.core.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference


class ServerRoutes:
    """What is served, and whether it can be."""

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
                "replicas": await replica_statuses(
                    (replica, self._links[replica.address]) for replica in self._membership.replicas
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
