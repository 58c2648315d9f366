"""Routing by cached prefixes and load, both converted to seconds."""

from collections.abc import Sequence

from services.common.recent import Recent
from services.gateway.core.fleet.load_tracker import era_of
from services.gateway.core.fleet.recent_prefixes import RecentReplicas
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.load_order import LoadOrder
from services.gateway.core.fleet.routing.offers import Offer, Offers
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason

_MAX_SESSIONS = 65_536
NEARLY_EQUAL = 1.05
"""The policy chooses at random among replicas with at most this factor times the lowest cost."""
AFFINITY = 0.9
"""The cost at the replica that served the session's previous request is multiplied by this factor,
so that requests with one session id are likely to be sent to one replica.
"""
SPREAD_LOAD_RATIO = 2
SPREAD_MIN_SHARING = 8
"""A prefix is hot if at least this many requests at a replica share it, and the replica has at
least SPREAD_LOAD_RATIO times the requests of the least loaded replica.

A sequence with a hot prefix is sent to the least loaded replica, which then caches the prefix, too
(Preble's rule). A sequence with a prefix that fewer requests share, such as the prefix of one
conversation, is sent to the cheapest replica as usual.
"""


class CacheAware:
    """Chooses the replica where the sequence costs the least time.

    1. Replicas with more than `max_load_delta` more requests than the least loaded replica are
       excluded, even if they have cached a prefix of the prompt. Otherwise a popular prefix could
       cause a queue in which requests wait longer than the prefix takes to compute.
    2. `LoadTracker` computes the cost at a replica as the sum of two parts. The first part is the
       time to compute the tokens that wait at the replica and the sequence's own uncached tokens.
       Own tokens are multiplied by a factor, which is larger if the replica has recently computed
       many tokens. The second part is the time by which the sequence and the replica's other
       requests slow each other down during decoding.
    3. A block is expected to be cached if the prefix directory reports it, or if it belongs to a
       sequence that was recently sent to the replica. So a burst of requests with the same new
       prefix is sent to one replica, which computes the prefix once.
    4. If at a replica most tokens that were expected to be cached turned out not to be cached, the
       cost at this replica is computed as if nothing were cached.
    """

    def __init__(self, parts: RoutingParts) -> None:
        self._rng = parts.rng
        self._clock = parts.clock
        self._directory = parts.directory
        self._max_load_delta = parts.max_load_delta
        self._sequence_keys = parts.sequence_keys
        self._sessions: Recent[str, str] = Recent(_MAX_SESSIONS)
        """Maps sessions to the addresses of the replicas that served their last requests."""
        self._recent = RecentReplicas()
        self._kept_order: LoadOrder | None = None
        self._last_candidates: Sequence[Replica] = ()

    def choose(self, inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        return self.choose_for_keys(inflight, candidates, self._keys(inflight, candidates[0]))

    def choose_for_keys(
        self, inflight: Inflight, candidates: Sequence[Replica], keys: Sequence[int]
    ) -> RoutingDecision:
        """Chooses a replica for a sequence. `keys` are the keys of the sequence's full blocks."""
        now = self._clock.time()
        session_id = inflight.request.session_id
        offers = Offers(self._order(candidates, now), inflight, keys, now)
        nodes = self._directory.match(keys)
        recent = self._recent.addresses(keys[0], now) if keys else ()
        address_before = self._sessions.get(session_id)
        offers.examine(nodes, [*recent, address_before or ""])
        chosen, reason = self._choose(offers, address_before)
        chosen.replica.recent_prefixes.add(keys, now, chosen.known_depth)
        if keys:
            self._recent.add(keys[0], chosen.replica.address, now)
        if session_id:
            self._sessions[session_id] = chosen.replica.address
        return RoutingDecision(
            chosen.replica.address,
            reason,
            len(candidates),
            chosen.num_cached_tokens,
            chosen.cost_seconds,
            _cached_key(chosen, keys),
        )

    def _order(self, candidates: Sequence[Replica], now: float) -> LoadOrder:
        """Returns the candidates in order of load. If two successive calls pass the same list
        object, the order is kept and only updated in later calls.
        """
        order, number = self._kept_order, era_of(now).number
        if order is not None and order.replicas is candidates and order.era_number == number:
            order.update()
            return order
        order = LoadOrder(candidates, number)
        if candidates is self._last_candidates:
            self._kept_order = order
            order.follow()
        self._last_candidates = candidates
        return order

    def _choose(self, offers: Offers, address_before: str | None) -> tuple[Offer, RoutingReason]:
        """Returns the offer (a replica and the sequence's cost there) of the chosen replica, and
        the reason for the choice. `address_before` is the address of the replica that served the
        session's previous request.
        """
        least = offers.order.least
        near = offers.near(least + self._max_load_delta, NEARLY_EQUAL)
        best = near.best
        if best.is_cached and _is_hot(best, offers.keys, least):
            return offers.near(least).best, RoutingReason.SPREAD
        before = next((o for o in near.examined if o.replica.address == address_before), best)
        if before is not best and AFFINITY * before.cost_seconds <= best.cost_seconds:
            return before, RoutingReason.AFFINITY
        chosen = offers.at(self._rng.choice(near.indexes))
        return chosen, RoutingReason.CACHED if chosen.is_cached else RoutingReason.CHEAPEST

    def _keys(self, inflight: Inflight, replica: Replica) -> Sequence[int]:
        """Returns the keys of the sequence's full blocks. The result is empty for prompts that are
        embeddings, which have no keys, and for requests that skip the prefix cache.
        """
        served, request = replica.description, inflight.request
        if served is None or request.prompt_embeds is not None or request.skip_reading_prefix_cache:
            return []
        return self._sequence_keys.of_sequence(inflight, served)


def _cached_key(offer: Offer, keys: Sequence[int]) -> int | None:
    return keys[offer.depth - 1] if offer.depth else None


def _is_hot(offer: Offer, keys: Sequence[int], least: int) -> bool:
    """Whether the sequence's cached prefix is hot (see SPREAD_MIN_SHARING) at the offer's replica.
    `least` is the number of requests of the least loaded replica.
    """
    load, key = offer.replica.load, _cached_key(offer, keys)
    return (
        key is not None
        and load.num_requests >= SPREAD_LOAD_RATIO * least
        and load.num_sharing(key) >= SPREAD_MIN_SHARING
    )
