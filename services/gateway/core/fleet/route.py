"""Where a sequence was sent, and why."""

import enum
from dataclasses import dataclass

from services.common.telemetry import names


class RoutingReason(enum.Enum):
    """Why a replica was chosen."""

    ONLY = "only"
    """No other one could take the sequence."""
    SAME_PROMPT = "same_prompt"
    """Another sequence of the request, with the same prompt, was sent there."""
    SESSION = "session"
    """It keeps the session of which the sequence is a turn."""
    LEAST_LOADED = "least_loaded"
    TURN = "turn"
    HASH = "hash"
    CACHED = "cached"
    """It is the cheapest one, and has a part of the prompt cached."""
    CHEAPEST = "cheapest"
    """It is the cheapest one, and has nothing of the prompt cached."""
    AFFINITY = "affinity"
    """It served the session before, and costs about as little as the cheapest one."""
    SPREAD = "spread"
    """The cheapest one has a hot prefix of the prompt cached, but twice the load of this one."""


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that a sequence is sent to."""

    address: str
    reason: RoutingReason
    num_candidates: int
    """Replicas that could take the sequence."""
    num_cached_tokens: int = 0
    """Tokens of the sequence that the replica is expected to have cached; 0 where the policy does
    not estimate them.
    """
    cost_seconds: float | None = None
    """Time of the replica that the sequence is expected to take; None where the policy does not
    estimate it.
    """
    cached_key: int | None = None
    """Key of the last block that is expected to be cached, by which sequences with the same cached
    beginning are counted.
    """

    def details(self) -> dict[str, str | int | float]:
        """The choice as attributes of a span."""
        details: dict[str, str | int | float] = {
            names.ATTR_ROUTING_REPLICA: self.address,
            names.ATTR_ROUTING_REASON: self.reason.value,
            names.ATTR_ROUTING_NUM_CANDIDATES: self.num_candidates,
            names.ATTR_ROUTING_NUM_CACHED_TOKENS: self.num_cached_tokens,
        }
        if self.cost_seconds is not None:
            details[names.ATTR_ROUTING_COST_SECONDS] = self.cost_seconds
        return details
