"""Routing by round robin."""

from collections.abc import Sequence

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason


class RoundRobin:
    """Chooses each replica in turn, in order of the replicas' addresses."""

    def __init__(self, _parts: RoutingParts) -> None:
        self._last = ""

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        replica = min(candidates, key=lambda one: (one.address <= self._last, one.address))
        self._last = replica.address
        return RoutingDecision(replica.address, RoutingReason.TURN, len(candidates))
