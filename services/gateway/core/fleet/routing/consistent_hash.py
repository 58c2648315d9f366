"""Routing by a hash of the session id, or of the prompt's first tokens."""

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from services.common.pool.block_hash import pack_token_ids
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason

POINTS_PER_REPLICA = 64
NUM_PREFIX_TOKENS = 256
MAX_OVER_MEAN = 1.25
MAX_ADDRESSES_OVER = 4
"""A ring with this number of times the candidates' addresses is made again with only these when a
candidate is added.
"""


class ConsistentHash:
    """Chooses a replica on a hash ring. The search starts at the hash of the session id, or of the
    prompt's first tokens if there is no session id. The policy chooses the next replica on the ring
    with at most 1.25 times the mean load.

    When a replica joins or leaves, only the sessions next to its points on the ring move. The load
    bound is from consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).
    """

    def __init__(self, _parts: RoutingParts) -> None:
        self._addresses: frozenset[str] = frozenset()
        """The addresses on the ring. Those that are no candidates now are skipped, because the
        candidates may differ at each call, and a ring of 100 replicas takes milliseconds to sort.
        """
        self._points: list[int] = []
        self._owners: list[str] = []

    def choose(self, inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        by_address = {replica.address: replica for replica in candidates}
        self._place(frozenset(by_address))
        num_requests = sum(replica.load.num_requests for replica in candidates)
        most = ceil(MAX_OVER_MEAN * (num_requests + 1) / len(candidates))
        begin = bisect(self._points, _point(_key(inflight)))
        ring = self._owners[begin:] + self._owners[:begin]
        replica = next(
            one
            for address in dict.fromkeys(ring)
            if (one := by_address.get(address)) is not None and one.load.num_requests < most
        )
        return RoutingDecision(replica.address, RoutingReason.HASH, len(candidates))

    def _place(self, addresses: frozenset[str]) -> None:
        if addresses <= self._addresses:
            return
        if len(self._addresses) < MAX_ADDRESSES_OVER * len(addresses):
            addresses |= self._addresses
        ring = sorted(
            (_point(f"{address} {number}".encode()), address)
            for address in addresses
            for number in range(POINTS_PER_REPLICA)
        )
        self._addresses = addresses
        self._points = [point for point, _ in ring]
        self._owners = [address for _, address in ring]


def _key(inflight: Inflight) -> bytes:
    request = inflight.request
    if request.session_id:
        return request.session_id.encode()
    return (
        request.cache_salt.encode()
        + request.adapter_digest
        + pack_token_ids(request.prompt_token_ids[:NUM_PREFIX_TOKENS])
    )


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
