"""Routing by load alone."""

from collections.abc import Sequence

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.route import Route, RoutingReason
from services.gateway.core.fleet.routing.policy import RoutingParts, least_loaded
from services.gateway.core.request.inflight import Inflight


class LeastLoaded:
    """The replica with the fewest requests, at random among several."""

    def __init__(self, parts: RoutingParts) -> None:
        self._rng = parts.rng

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> Route:
        replica = least_loaded(candidates, self._rng)
        return Route(replica.address, RoutingReason.LEAST_LOADED, len(candidates))


class PowerOfTwo:
    """The less loaded one of two random replicas (Mitzenmacher, 2001): nearly as even as the least
    loaded of all, without every gateway sending to the same one while its view of the load is old.
    """

    def __init__(self, parts: RoutingParts) -> None:
        self._rng = parts.rng

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> Route:
        replica = least_loaded(self._rng.sample(candidates, 2), self._rng)
        return Route(replica.address, RoutingReason.LEAST_LOADED, len(candidates))
