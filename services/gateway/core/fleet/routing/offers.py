"""What a sequence costs at the replicas, and how to find the cheapest without examining all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.gateway.core.fleet.load_tracker import cost_seconds, era_of
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.load_order import LoadOrder
from services.gateway.core.request.inflight import Inflight

MIN_TRUST = 0.5
"""Predictions for a replica are ignored if less than this fraction of the predicted tokens was
really cached.
"""
FEW_TOKENS = 2048
"""This number is added to each replica's number of recently computed tokens before the replicas are
compared. Therefore replicas that computed few tokens hardly differ, since few tokens evict few
blocks.
"""


@dataclass(slots=True)
class Offer:
    """The cost of a sequence at one replica, and the number of its blocks that are cached there.
    The class is not frozen, since frozen dataclasses are slower to create.
    """

    replica: Replica
    known_depth: int
    """Number of leading blocks of the sequence that are cached at the replica according to the
    directory.
    """
    depth: int
    """Number of leading blocks of the sequence that are expected to be cached at the replica."""
    num_cached_tokens: int
    is_cached: bool
    """Whether some tokens are expected to be cached and the prediction is trusted."""
    cost_seconds: float


class Offers:
    """The offers for one sequence. Most replicas are not examined, since a lower bound of the cost
    at replicas that have cached nothing shows that they will not be chosen.
    """

    def __init__(
        self, order: LoadOrder, inflight: Inflight, keys: Sequence[int], now: float
    ) -> None:
        request = inflight.request
        self.order = order
        self.keys = keys
        self._now = now
        self._num_tokens = len(request.prompt_token_ids) + len(inflight.output_token_ids)
        self._max_output_tokens = request.sampling.max_tokens
        self._few = FEW_TOKENS * era_of(now).weight
        self._mean = order.mean_weight + self._few
        self._num_output_tokens = order.least_output_tokens
        if self._max_output_tokens is not None:
            self._num_output_tokens = min(self._num_output_tokens, self._max_output_tokens)
        self._nodes: Mapping[str, int] = {}
        self._examined: dict[int, Offer] = {}

    def examine(self, nodes: Mapping[str, int], addresses: Iterable[str]) -> None:
        """Examines the replicas that may have cached something, and others. `nodes` maps cache
        nodes to the number of leading blocks that they have cached according to the directory.
        """
        self._nodes = nodes
        by_node = map(self.order.index_of_node.get, nodes)
        for index in {*by_node, *map(self.order.index_of.get, addresses)}:
            if index is not None:
                self._examined[index] = self._offer(self.order.replicas[index])

    def near(self, max_num_requests: int, factor: float = 1.0) -> list[Offer]:
        """Offers of replicas with at most `max_num_requests`, in the order of the replicas. All
        offers are included whose cost is at most `factor` times the lowest of these costs.
        """
        order = self.order
        offers = {
            index: offer
            for index, offer in self._examined.items()
            if offer.replica.load.num_requests <= max_num_requests
        }
        most = factor * min((offer.cost_seconds for offer in offers.values()), default=math.inf)
        for num_requests, entries in order.levels(max_num_requests):
            least = self._least_cost(num_requests, 0.0)
            if least > most:
                break
            weight_before = 0.0
            for weight, index in entries:
                if weight != weight_before:
                    least, weight_before = self._least_cost(num_requests, weight), weight
                if least > most:
                    break
                if index not in offers:
                    offer = offers[index] = self._offer(order.replicas[index])
                    most = min(most, factor * offer.cost_seconds)
        return [offers[index] for index in sorted(offers)]

    def _least_cost(self, num_requests: int, weight: float) -> float:
        """A lower bound of the cost at replicas with this load that have cached nothing."""
        return cost_seconds(
            self.order.least_speeds,
            self.order.fleet_speeds,
            0,
            self._num_tokens,
            (weight + self._few) / self._mean,
            num_requests * self._num_output_tokens,
        )

    def _offer(self, replica: Replica) -> Offer:
        load, served, keys = replica.load, replica.description, self.keys
        load.refresh()
        num_tokens = self._num_tokens
        num_cached = known_depth = depth = 0
        if keys and served is not None:
            known_depth = self._nodes.get(served.cache_node, 0)
            depth = replica.recent_prefixes.depth(keys, self._now, known_depth)
            num_cached = min(depth * served.block_size, num_tokens - 1)
        is_trusted = load.trust >= MIN_TRUST
        cost = load.cost_seconds(
            num_tokens - num_cached if is_trusted else num_tokens,
            self._max_output_tokens,
            self.order.fleet_speeds,
            (load.recent_weight(self.order.era_number) + self._few) / self._mean,
        )
        is_cached = is_trusted and num_cached > 0
        return Offer(replica, known_depth, depth, num_cached, is_cached, cost)
