"""Routing by load only."""

from collections.abc import Sequence

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingParts, least_loaded
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason


class LeastLoaded:
    """Chooses the replica with the fewest requests, at random if there are several."""

    def __init__(self, parts: RoutingParts) -> None:
        self._rng = parts.rng

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        replica = least_loaded(candidates, self._rng)
        return RoutingDecision(replica.address, RoutingReason.LEAST_LOADED, len(candidates))


class PowerOfTwo:
    """Chooses the less loaded of two random replicas (Mitzenmacher, 2001). This balances the load
    nearly as well as LeastLoaded. Its advantage is that several gateways with outdated loads do not
    all choose the same replica.
    """

    def __init__(self, parts: RoutingParts) -> None:
        self._rng = parts.rng

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        replica = least_loaded(self._rng.sample(candidates, 2), self._rng)
        return RoutingDecision(replica.address, RoutingReason.LEAST_LOADED, len(candidates))
