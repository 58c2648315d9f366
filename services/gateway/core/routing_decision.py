"""The choice of a replica for a sequence (the prompt and one answer), with the reason."""

import enum
from dataclasses import dataclass

from services.common.telemetry import names


class RoutingReason(enum.Enum):
    ONLY = "only"
    """No other replica could accept the sequence."""
    SAME_PROMPT = "same_prompt"
    """Another sequence of the same request with the same prompt was sent to the replica."""
    SESSION = "session"
    """The sequence is a request of a client's session, and the replica keeps the KV blocks of the
    session's previous request.
    """
    LEAST_LOADED = "least_loaded"
    TURN = "turn"
    HASH = "hash"
    CACHED = "cached"
    """The replica has the lowest cost, and has a part of the prompt cached."""
    CHEAPEST = "cheapest"
    """The replica has the lowest cost, and has no part of the prompt cached."""
    AFFINITY = "affinity"
    """The replica served the previous request with the same session id, and the cost there is close
    to the lowest.
    """
    SPREAD = "spread"
    """The replica is the least loaded. Another replica has the lowest cost, because it has cached a
    prefix that many of its requests share, but it has at least twice the load.
    """


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The replica to which a sequence is sent."""

    address: str
    reason: RoutingReason
    num_candidates: int
    """Number of replicas that could accept the sequence."""
    num_cached_tokens: int = 0
    """Number of the sequence's tokens that are expected to be cached at the replica."""
    cost_seconds: float | None = None
    """Expected cost of the sequence in seconds of the replica's time. It is None if the routing
    policy does not estimate costs.
    """
    cached_key: int | None = None
    """Key of the last block that is expected to be cached, or None if there is no such block.
    Sequences with the same key share a cached prefix.
    """

    def details(self) -> dict[str, str | int | float]:
        """Returns the decision as attributes of an OpenTelemetry span."""
        details: dict[str, str | int | float] = {
            names.ATTR_ROUTING_REPLICA: self.address,
            names.ATTR_ROUTING_REASON: self.reason.value,
            names.ATTR_ROUTING_NUM_CANDIDATES: self.num_candidates,
            names.ATTR_ROUTING_NUM_CACHED_TOKENS: self.num_cached_tokens,
        }
        if self.cost_seconds is not None:
            details[names.ATTR_ROUTING_COST_SECONDS] = self.cost_seconds
        return details
