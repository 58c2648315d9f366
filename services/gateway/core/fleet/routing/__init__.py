"""The routing policies. The table POLICIES maps the names in the setting to the policies' classes.
To add a policy, add a module to this package and one line to the table. A policy of another package
is named `package.module:Class`.
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
"""The check of the setting that names the routing policy."""


def make_policy(name: str, parts: RoutingParts) -> RoutingPolicy:
    """Makes the policy with this name. Raises InvalidArgument if there is no such policy."""
    if complaint := check_policy(name):
        raise InvalidArgument(f"routing_policy {complaint}, not {name!r}", field="routing_policy")
    make = POLICIES.get(name) or load_class(name, "choose")
    policy: RoutingPolicy = make(parts)
    return policy
