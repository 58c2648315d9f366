"""The interface of routing policies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.fleet.routing.chain_keys import ChainKeys
from services.gateway.core.ports import Clock, PrefixDirectory
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision


class RoutingPolicy(Protocol):
    """A rule that chooses one of several replicas."""

    def choose(self, inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        """Chooses one of at least two `candidates`. All candidates are ready, and either all or
        none of them have room in their queues. If a request has several sequences with the same
        prompt, `choose` is called only for the first.
        """
        ...


class SequenceKeys(Protocol):
    """Computes the keys by which the prefix directory identifies a sequence's KV blocks."""

    def of_sequence(self, inflight: Inflight, served: ReplicaDescription) -> Sequence[int]:
        """Returns the keys of the sequence's full blocks in order, for replicas with the model and
        block sizes of `served`.
        """
        ...


@dataclass(frozen=True, slots=True)
class RoutingParts:
    """The arguments with which routing policies are built."""

    rng: random.Random
    clock: Clock
    directory: PrefixDirectory
    max_load_delta: int
    """Maximum number of requests that a chosen replica has more than the least loaded replica."""
    sequence_keys: SequenceKeys = field(default_factory=ChainKeys)


def least_loaded(candidates: Sequence[Replica], rng: random.Random) -> Replica:
    """Returns the replica with the fewest requests, at random if there are several."""
    least = min(replica.load.num_requests for replica in candidates)
    return rng.choice([one for one in candidates if one.load.num_requests == least])
