"""Where a sequence was sent, and why."""

import enum
from dataclasses import dataclass


class RoutingReason(enum.Enum):
    """Why a replica was chosen."""

    ONLY = "only"
    """No other one could take the sequence."""
    SAME_PROMPT = "same_prompt"
    """Another sequence of the request, with the same prompt, was sent there."""
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
    """The cheapest one has the prompt cached, but has twice the load of this one."""


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that a sequence is sent to.

    `num_candidates` are the replicas that could take it, `num_cached_tokens` how many of its tokens
    this one is expected to have cached, and `cost_seconds` the time that it is expected to take of
    the replica; 0 and None where the policy does not estimate them.
    """

    address: str
    reason: RoutingReason
    num_candidates: int
    num_cached_tokens: int = 0
    cost_seconds: float | None = None
