"""The routing policies. To add a policy, add a module to this package and one line to the table
POLICIES. A policy of another package is named `package.module:Class`.
"""

from collections.abc import Callable

from services.common.errors import InvalidArgument
from services.common.process.outside_class import load_class, one_of_or_class
from services.gateway.core.fleet.routing.cache_aware import CacheAware
from services.gateway.core.fleet.routing.consistent_hash import ConsistentHash
from services.gateway.core.fleet.routing.least_loaded import LeastLoaded, PowerOfTwo
from services.gateway.core.fleet.routing.policy import RoutingParts, RoutingPolicy
from services.gateway.core.fleet.routing.round_robin import RoundRobin

POLICIES: dict[str, Callable[[RoutingParts], RoutingPolicy]] = {
    "cache-aware": CacheAware,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "consistent-hash": ConsistentHash,
    "power-of-two": PowerOfTwo,
}

check_policy = one_of_or_class(POLICIES, "choose")


def make_policy(name: str, parts: RoutingParts) -> RoutingPolicy:
    """Raises InvalidArgument if there is no policy with this name."""
    if complaint := check_policy(name):
        raise InvalidArgument(f"routing_policy {complaint}, not {name!r}", field="routing_policy")
    make = POLICIES.get(name) or load_class(name, "choose")
    policy: RoutingPolicy = make(parts)
    return policy
