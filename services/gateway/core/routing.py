"""Which replica a sequence is sent to."""

import random
from collections.abc import Sequence
from typing import Protocol

from services.gateway.core.inflight import Inflight
from services.gateway.core.replica import Replica


class RoutingPolicy(Protocol):
    """The rule by which one of several replicas is chosen."""

    def choose(self, inflight: Inflight, candidates: Sequence[Replica]) -> Replica:
        """One of `candidates`, which are ready and equal in whether their queues have room; there
        is at least one. Sequences of the same prompt follow the first one without being asked for.
        """


class LeastLoaded:
    """The replica with the fewest unfinished sequences of this gateway, at random among several."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> Replica:
        least = min(replica.num_unfinished for replica in candidates)
        return self._rng.choice([r for r in candidates if r.num_unfinished == least])
