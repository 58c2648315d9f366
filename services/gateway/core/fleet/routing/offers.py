"""Computes the costs of a sequence at the replicas, and finds the cheapest replica without
examining all of them.
"""

import math
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.gateway.core.fleet.load_tracker import Speeds, cost_seconds, era_of
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.load_order import Entry, LoadOrder
from services.gateway.core.request.inflight import Inflight

MIN_TRUST = 0.5
"""Expected cache hits at a replica are ignored if less than this fraction of the expected cached
tokens was really cached.
"""
FEW_TOKENS = 2048
"""This number is added to each replica's number of recently computed tokens. The sum divided by the
replicas' mean sum is the replica's eviction pressure. So replicas that computed few tokens, which
evict few blocks, have nearly equal pressures.
"""


@dataclass(slots=True)
class Offer:
    """The cost of a sequence at one replica, and the number of the sequence's blocks that the
    replica has cached. The class is not frozen, since frozen dataclasses are slower to create.
    """

    replica: Replica
    known_depth: int
    """Number of leading blocks that the prefix directory reports as cached."""
    depth: int
    """Number of leading blocks that are expected to be cached. It includes the blocks of sequences
    that were recently sent to the replica.
    """
    num_cached_tokens: int
    is_cached: bool
    """Whether the replica is expected to have cached tokens, and is trusted (see MIN_TRUST)."""
    cost_seconds: float


@dataclass(slots=True)
class Near:
    """The replicas at which a sequence costs little more than at the cheapest one."""

    best: Offer
    """The offer with the lowest cost, or the first of several in order of the replicas."""
    indexes: list[int]
    """Indices of the replicas whose costs are near the lowest cost, in ascending order."""
    examined: list[Offer]
    """All offers that `Offers.examine` has computed, near or not."""


class Offers:
    """The replicas' offers for one sequence. Most replicas need not be examined, because for a
    replica that has cached nothing a lower bound of the cost shows that it will not be chosen.
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
        self._idle_speeds = order.idle_speeds or order.fleet_speeds
        self._nodes: Mapping[str, int] = {}
        self._examined: dict[int, Offer] = {}

    def examine(self, nodes: Mapping[str, int], addresses: Iterable[str]) -> None:
        """Computes the offers of the replicas in `nodes` and `addresses`. `nodes` maps the name of
        each pool that has cached a prefix, according to the prefix directory, to the number of
        cached leading blocks.
        """
        self._nodes = nodes
        by_node = map(self.order.index_of_node.get, nodes)
        for index in {*by_node, *map(self.order.index_of.get, addresses)}:
            if index is not None:
                self._examined[index] = self._offer(self.order.replicas[index])

    def near(self, max_num_requests: int, factor: float = 1.0) -> Near:
        """Finds, among the replicas with at most `max_num_requests` requests, the replicas whose
        cost is at most `factor` times the lowest cost. If replicas without requests differ only in
        their numbers of recently computed tokens, these replicas are found by bisection.
        """
        order = self.order
        offers = {
            index: offer
            for index, offer in self._examined.items()
            if offer.replica.load.num_requests <= max_num_requests
        }
        examined = list(offers.values())
        idle: Sequence[Entry] = ()
        most = factor * min((offer.cost_seconds for offer in examined), default=math.inf)
        for num_requests, entries in order.levels(max_num_requests):
            if num_requests == 0 and order.idle_speeds is not None:
                idle = entries
                most = min(most, factor * self._idle_cost(idle[0]))
                continue
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
        first = next((entry for entry in idle if entry[1] not in offers), None)
        if first is not None:
            index = min(self._idle_up_to(self._idle_cost(first), idle, offers))
            offers[index] = self._offer(order.replicas[index])
        best = min(sorted(offers), key=lambda index: offers[index].cost_seconds)
        most = factor * offers[best].cost_seconds
        near = self._idle_up_to(most, idle, offers)
        near += [index for index, offer in offers.items() if offer.cost_seconds <= most]
        return Near(offers[best], sorted(near), examined)

    def at(self, index: int) -> Offer:
        return self._examined.get(index) or self._offer(self.order.replicas[index])

    def _idle_up_to(self, most: float, idle: Sequence[Entry], others: Container[int]) -> list[int]:
        end = bisect_right(idle, most, key=self._idle_cost)
        return [index for _, index in idle[:end] if index not in others]

    def _idle_cost(self, entry: Entry) -> float:
        return self._cost(self._idle_speeds, entry[0], 0)

    def _least_cost(self, num_requests: int, weight: float) -> float:
        """Returns a lower bound of the cost at replicas with this load that have cached nothing."""
        num_decoded_tokens = num_requests * self._num_output_tokens
        return self._cost(self.order.least_speeds, weight, num_decoded_tokens)

    def _cost(self, speeds: Speeds, weight: float, num_decoded_tokens: float) -> float:
        """Returns the cost at a replica that has no uncomputed tokens and has cached nothing."""
        pressure = (weight + self._few) / self._mean
        fleet_speeds, num_tokens = self.order.fleet_speeds, self._num_tokens
        return cost_seconds(speeds, fleet_speeds, 0, num_tokens, pressure, num_decoded_tokens)

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
