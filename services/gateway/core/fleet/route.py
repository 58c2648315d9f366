"""The choice of a replica for a sequence, with its reason."""

import enum
from dataclasses import dataclass

from services.common.telemetry import names


class RoutingReason(enum.Enum):
    """The reason for which a replica was chosen."""

    ONLY = "only"
    """No other replica could accept the sequence."""
    SAME_PROMPT = "same_prompt"
    """Another sequence of the request, with the same prompt, was sent there."""
    SESSION = "session"
    """It keeps the session whose next turn the sequence is."""
    LEAST_LOADED = "least_loaded"
    TURN = "turn"
    HASH = "hash"
    CACHED = "cached"
    """It has the lowest cost, and has a part of the prompt cached."""
    CHEAPEST = "cheapest"
    """It has the lowest cost, and has no part of the prompt cached."""
    AFFINITY = "affinity"
    """It served the session before, and its cost is close to the lowest."""
    SPREAD = "spread"
    """The replica with the lowest cost has a hot prefix of the prompt cached, but
    twice this one's load.
    """


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that a sequence is sent to."""

    address: str
    reason: RoutingReason
    num_candidates: int
    """Number of replicas that could accept the sequence."""
    num_cached_tokens: int = 0
    """Tokens of the sequence that the replica is expected to have cached; 0 if the
    policy has no estimate.
    """
    cost_seconds: float | None = None
    """Expected cost of the sequence at the replica, in seconds of its time; None if
    the policy has no estimate.
    """
    cached_key: int | None = None
    """Key of the last block expected to be cached. It identifies sequences with the same cached
    prefix. None if no block is expected.
    """

    def details(self) -> dict[str, str | int | float]:
        """The choice as span attributes."""
        details: dict[str, str | int | float] = {
            names.ATTR_ROUTING_REPLICA: self.address,
            names.ATTR_ROUTING_REASON: self.reason.value,
            names.ATTR_ROUTING_NUM_CANDIDATES: self.num_candidates,
            names.ATTR_ROUTING_NUM_CACHED_TOKENS: self.num_cached_tokens,
        }
        if self.cost_seconds is not None:
            details[names.ATTR_ROUTING_COST_SECONDS] = self.cost_seconds
        return details
