"""The routing policies. The table maps their names in the setting to their classes. A new policy is
a module in this package and one line in the table.
"""

from collections.abc import Callable

from services.common.errors import InvalidArgument
from services.gateway.core.fleet.routing.cache_aware import CacheAware
from services.gateway.core.fleet.routing.consistent_hash import ConsistentHash
from services.gateway.core.fleet.routing.least_loaded import LeastLoaded, PowerOfTwo, RoundRobin
from services.gateway.core.fleet.routing.policy import RoutingParts, RoutingPolicy

POLICIES: dict[str, Callable[[RoutingParts], RoutingPolicy]] = {
    "cache-aware": CacheAware,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "consistent-hash": ConsistentHash,
    "power-of-two": PowerOfTwo,
}


def make_policy(name: str, parts: RoutingParts) -> RoutingPolicy:
    """Makes the policy with this name. Raises InvalidArgument if there is no such policy."""
    if name not in POLICIES:
        raise InvalidArgument(
            f"routing_policy must be one of {', '.join(POLICIES)}, not {name!r}",
            field="routing_policy",
        )
    return POLICIES[name](parts)
