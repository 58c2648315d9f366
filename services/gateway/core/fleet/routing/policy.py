"""The rule by which one of several replicas is chosen."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.route import Route
from services.gateway.core.ports import Clock, PrefixDirectory
from services.gateway.core.request.inflight import Inflight


class RoutingPolicy(Protocol):
    """The rule by which one of several replicas is chosen."""

    def choose(self, inflight: Inflight, candidates: Sequence[Replica]) -> Route:
        """One of `candidates`, which are ready and equal in whether their queues have room; there
        are at least two. Sequences of the same prompt follow the first one without being asked for.
        """
        ...


@dataclass(frozen=True, slots=True)
class RoutingParts:
    """The arguments that policies are built with."""

    rng: random.Random
    clock: Clock
    directory: PrefixDirectory
    max_load_delta: int
    """A replica that has this many more requests than the least loaded one gets none."""


def least_loaded(candidates: Sequence[Replica], rng: random.Random) -> Replica:
    """The replica with the fewest requests, at random among several."""
    least = min(replica.load.num_requests for replica in candidates)
    return rng.choice([one for one in candidates if one.load.num_requests == least])
